import os, sys, time, traceback, faulthandler, shutil, types
W=int(sys.argv[1]); LIMIT=float(sys.argv[2]); WHAT=sys.argv[3]; PCT=int(sys.argv[4]) if len(sys.argv)>4 else 0
sys.path.insert(0,os.getcwd())
os.environ.update(TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1",TORCH_SYMM_MEM_DISABLE_MULTICAST="1",TRITON_INTERPRET="0")
def patch():
    d="/tmp/expk"; shutil.rmtree(d,ignore_errors=True); shutil.copytree("iris",d+"/iris")
    k=d+"/iris/lower/kernels/"
    s=open(k+"protocol.py").read()
    return d
def worker(rank,q,port,d):
    try:
        sys.path.insert(0,d)
        import torch, torch.distributed as dist
        faulthandler.dump_traceback_later(LIMIT-5,exit=True)
        torch.cuda.set_device(0)
        os.environ.update(MASTER_ADDR="127.0.0.1",MASTER_PORT=str(port),RANK=str(rank),WORLD_SIZE=str(W),LOCAL_RANK=str(rank))
        dist.init_process_group("cpu:gloo,cuda:nccl",rank=rank,world_size=W)
        from iris.bench import stages as S, timing
        from types import SimpleNamespace
        from iris.lower.kernels.config import GemmConfig
        import iris; ctx=iris.iris(4<<30); group=ctx.world
        _,handle=S.symmetric(64)
        align=lambda: handle.barrier()
        say=lambda s: q.put(s) if rank==0 else None
        NS=torch.cuda.get_device_properties(0).multi_processor_count
        say(f"W={W} SMs {NS}")
        if "cublas" in WHAT:
            for M,K,N in ((64,4096,14336//W),(512,4096,14336//W),(8,4096,14336//W)):
                x=S.random_tensor(M,K,seed=1+rank); w=S.random_tensor(N,K,seed=2).T
                for name,r in (("matmul",x@w),("out=",torch.matmul(x,w,out=torch.empty(M,N,device="cuda",dtype=x.dtype)))):
                    f=(x.float()@w.float()); e=((r.float()-f).view(M,-1,128).norm(dim=(0,2))/f.view(M,-1,128).norm(dim=(0,2)))
                    bad=(~(e<1e-2)).nonzero().flatten().tolist()
                    if bad: q.put(f"rank {rank} cuBLAS {name} M{M} wrong in column tiles {bad}")
                say(f"cublas checked {M}")
        if "team" in WHAT:
            for name,M,hid,inn in (("ag",2048,4096,14336),("rs",2048,4096,14336),("ag",512,8192,28672),("rs",512,8192,28672)):
              for progs in (0,24):
                cfg=GemmConfig(128,256,64,8,3,8,pieces=2,cut=True,programs=progs)
                if name=="ag":
                    x=S.random_tensor(M//W,hid,seed=rank); w=S.random_tensor(inn//W,hid,seed=9+rank).T; out=torch.empty(M,inn//W,device="cuda",dtype=x.dtype)
                    st=S.AllGatherMatmul.create(ctx,group,M=M,K=hid,columns=[inn//W],dtype=x.dtype,config=cfg); f=lambda dry=0: st(x,[w],out=[out],dry=dry)
                else:
                    x=S.random_tensor(M,inn//W,seed=rank); w=S.random_tensor(hid,inn//W,seed=9+rank).T; out=torch.empty(M//W,hid,device="cuda",dtype=x.dtype)
                    st=S.MatmulReduceScatter.create(ctx,group,M=M,N=hid,K=inn//W,dtype=x.dtype,config=cfg); f=lambda dry=0: st(x,w,out=out,dry=dry)
                f(1); torch.cuda.synchronize(); dist.barrier()
                t=timing.time_graph(f,align)
                h=[1]; tot=1
                q.put(f"rank {rank} {name}{M} programs {progs or NS} {t.median:.0f} [{t.low:.0f} {t.high:.0f}] team sizes "+" ".join(f"{i}:{v*100/tot:.1f}%" for i,v in enumerate(h) if v))
                dist.barrier()
        if "ar" in WHAT:
            from iris.lower.kernels.matmul_all_reduce import MatmulAllReduce
            g=dist.group.WORLD.group_name
            for M,K,N in ((1,14336//W,4096),(8,14336//W,4096),(64,14336//W,4096),(64,28672//W,8192),(512,28672//W,8192)):
                x=S.random_tensor(M,K,seed=rank); w=S.random_tensor(N,K,seed=9+rank).T
                P,_=S.symmetric(M,N)
                def ar1(): torch.matmul(x,w,out=P); return torch.ops.symm_mem.one_shot_all_reduce(P.view(-1),"sum",g)
                def ar2(): torch.matmul(x,w,out=P); return torch.ops.symm_mem.two_shot_all_reduce_(P.view(-1),"sum",g)
                plain=torch.empty(M,N,device="cuda",dtype=x.dtype)
                calls={"gemm":lambda: torch.matmul(x,w,out=plain)}
                if M*N%(8*W)==0: calls|={"one":ar1,"two":ar2}
                part=(x.float()@w.float()).bfloat16(); allp=[None]*W; dist.all_gather_object(allp,part.cpu()); ref=sum(p.float() for p in allp).cuda()
                for one in (True,False):
                  for pieces in (1,4):
                    cfg=GemmConfig(64,128,128,4,4,8,pieces=pieces,copy=4096) if M<=64 else GemmConfig(128,256,64,8,3,8,pieces=2*pieces//2 if pieces>1 else 2)
                    st=MatmulAllReduce.create(ctx,group,M=M,N=N,K=K,dtype=x.dtype,one_shot=one,config=cfg)
                    o=torch.full((M,N),float("nan"),device="cuda",dtype=x.dtype)
                    f=lambda st=st,o=o,dry=0: st(x,w,out=o,dry=dry)
                    f(dry=1); torch.cuda.synchronize(); dist.barrier()
                    for _ in range(3): f()
                    torch.cuda.synchronize(); dist.barrier()
                    e=((o.float()-ref).norm()/ref.norm()).item()
                    if not e<1e-2: q.put(f"rank {rank} AR wrong {M} {one} {e}")
                    calls[f"iris {'one' if one else 'two'}-shot p{pieces}"]=f
                ts={n:timing.time_graph(c,align).median for n,c in calls.items()}
                say(f"matmul_all_reduce M{M} K{K} N{N}: "+", ".join(f"{n} {t:.1f}" for n,t in ts.items()))
        if "coll" in WHAT:
            from iris.lower.kernels import collectives as C
            g=dist.group.WORLD.group_name
            for n in (4096,65536,1<<20,1<<24):
                P,_=S.symmetric(n); x=S.random_tensor(n,seed=rank); o=torch.empty_like(x)
                alls=[S.random_tensor(n,seed=r) for r in range(W)]; ref=sum(a.float() for a in alls).bfloat16()
                line=[]
                for two in (False,True):
                    st=C.all_reduce(ctx,group,[n],"sum",x.dtype,two_shot=two); st.warm(x,out=o); torch.cuda.synchronize(); dist.barrier()
                    for _ in range(3): st(x,out=o)
                    torch.cuda.synchronize(); ok=torch.equal(o,ref) or f"{(o.float()-ref.float()).abs().max().item():.2g}"
                    line.append(f"iris {'two' if two else 'one'} {timing.time_graph(lambda: st(x,out=o),align).median:.1f} {ok}")
                def t1(): P.copy_(x); return torch.ops.symm_mem.one_shot_all_reduce(P,"sum",g)
                def t2(): P.copy_(x); return torch.ops.symm_mem.two_shot_all_reduce_(P,"sum",g)
                line+= [f"torch one {timing.time_graph(t1,align).median:.1f}",f"torch two {timing.time_graph(t2,align).median:.1f}"]
                ag=C.all_gather(ctx,group,[n],[n]*W,0,x.dtype); og=torch.empty(W*n,device="cuda",dtype=x.dtype); ag.warm(x,out=og); torch.cuda.synchronize(); dist.barrier()
                for _ in range(3): ag(x,out=og)
                torch.cuda.synchronize()
                line.append(f"all_gather {timing.time_graph(lambda: ag(x,out=og),align).median:.1f} {torch.equal(og,torch.cat(alls))}")
                say(f"{n*2/1024:.0f} KiB: "+", ".join(line))
        if "norm" in WHAT:
            from iris.lower.kernels.all_reduce_norm import AllReduceNorm
            import torch.nn.functional as F
            g=dist.group.WORLD.group_name
            for M,N in ((1,4096),(8,8192),(64,8192),(512,8192)):
                x=S.random_tensor(M,N,seed=rank); r=S.random_tensor(M,N,seed=50); w=S.random_tensor(N,seed=51); o=torch.empty_like(x); h=torch.empty_like(x)
                xs=[S.random_tensor(M,N,seed=q_) for q_ in range(W)]
                ref=sum(t.float() for t in xs).bfloat16()+r; rn=F.rms_norm(ref,(N,),w,1e-6)
                st=AllReduceNorm.create(ctx,group,M=M,N=N,dtype=x.dtype); st.warm(x,r,w,out=o,summed=h); torch.cuda.synchronize(); dist.barrier()
                for _ in range(3): st(x,r,w,out=o,summed=h)
                torch.cuda.synchronize()
                ok=(torch.equal(h,ref),((o.float()-rn.float()).norm()/rn.float().norm()).item())
                P,_=S.symmetric(M,N)
                def t1():
                    P.copy_(x); y=torch.ops.symm_mem.one_shot_all_reduce(P.view(-1),"sum",g).view(M,N)+r; return F.rms_norm(y,(N,),w,1e-6)
                a,b=timing.time_graph(lambda: st(x,r,w,out=o,summed=h),align).median,timing.time_graph(t1,align).median
                say(f"norm M{M} N{N}: iris {a:.1f} torch {b:.1f} {ok}")
    except BaseException:
        q.put(f"rank {rank} "+traceback.format_exc()[-2500:])
if __name__=="__main__":
    import multiprocessing as mp
        from iris.bench.mps import share_of, private_daemon
    d=patch()
    ctx=mp.get_context("spawn"); q=ctx.Queue()
    with private_daemon(W>1) as env:
        os.environ.update(env)
        if W>1: os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]=str(PCT or share_of(W))
        ps=[ctx.Process(target=worker,args=(r,q,29970+W,d)) for r in range(W)]
        [p.start() for p in ps]; t0=time.time()
        while any(p.is_alive() for p in ps) and time.time()-t0<LIMIT:
            time.sleep(.2)
            while not q.empty(): print(q.get(),flush=True)
        for p in ps:
            if p.is_alive(): p.kill(); print("killed",flush=True)
        while not q.empty(): print(q.get(),flush=True)
