"""Are grids of exactly the partition's size wholly resident? And a time line of the RS and AG kernels."""
import os, sys, time, traceback, faulthandler, shutil, types
W=int(sys.argv[1]); LIMIT=float(sys.argv[2])
sys.path.insert(0,os.getcwd())
os.environ.update(TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1",TORCH_SYMM_MEM_DISABLE_MULTICAST="1",TRITON_INTERPRET="0")
# a patched copy of the package: stamps of %globaltimer in state[16 + 8 * number ...]
D=f"/tmp/exp{os.getppid() if len(sys.argv)>3 else os.getpid()}"
def patch():
    d="/tmp/expk"; shutil.rmtree(d,ignore_errors=True); shutil.copytree("iris",d+"/iris")
    k=d+"/iris/lower/kernels/"
    s=open(k+"protocol.py").read()
    s=s.replace("STATE_WORDS = 16","STATE_WORDS = 16 + 8*256")
    s=s.replace('''@device_function
def enter''','''from triton.language.extra.cuda import globaltimer, smid
@device_function
def stamp(state, number, which):
    tl.store(state + 16 + number * 8 + which, globaltimer().to(tl.int32))
@device_function
def stamp_sm(state, number):
    tl.store(state + 16 + number * 8 + 7, smid())
@device_function
def enter''')
    open(k+"protocol.py","w").write(s)
    for f in ("matmul_reduce_scatter.py","all_gather_matmul.py"):
        s=open(k+f).read()
        s=s.replace("        epoch, number = enter(state)\n","        epoch, number = enter(state)\n        stamp(state, number, 0)\n        stamp_sm(state, number)\n")
        s=s.replace("        if all_started(state):","        stamp(state, number, 1)\n        if all_started(state):")
        s=s.replace("        mine = peer(flags, rank, tl.int32)\n        if T.a_mode","        mine = peer(flags, rank, tl.int32)\n        stamp(state, number, 1)\n        if T.a_mode")
        s=s.replace("        leave(state, epoch)","        stamp(state, number, 2)\n        leave(state, epoch)")
        s=s.replace("import all_started,","import stamp, stamp_sm, all_started,").replace("    enter,\n    finished","    enter,\n    stamp,\n    stamp_sm,\n    finished")
        open(k+f,"w").write(s)
    return d
def worker(rank,q,port,d):
    try:
        sys.path.insert(0,d)
        m=types.ModuleType("iris"); m.__path__=[d+"/iris"]; sys.modules["iris"]=m
        import torch, torch.distributed as dist
        faulthandler.dump_traceback_later(LIMIT-5,exit=True)
        torch.cuda.set_device(0)
        os.environ.update(MASTER_ADDR="127.0.0.1",MASTER_PORT=str(port),RANK=str(rank),WORLD_SIZE=str(W),LOCAL_RANK=str(rank))
        dist.init_process_group("cpu:gloo,cuda:nccl",rank=rank,world_size=W)
        from iris.bench import stages as S
        from types import SimpleNamespace
        from iris.lower.kernels.config import GemmConfig
        ctx,group=SimpleNamespace(heap=S.SymmetricHeap()),S.World()
        _,handle=S.symmetric(64)
        NS=torch.cuda.get_device_properties(0).multi_processor_count
        for name,M,hid,inn in (("ag",512,8192,28672),("rs",512,8192,28672),("ag",2048,4096,14336),("rs",2048,4096,14336),("ag",64,4096,14336),("rs",64,4096,14336)):
            cfg=GemmConfig(128,256,64,8,3,8,pieces=2,cut=False) if M>64 else GemmConfig(64,128,128,4,4,8,pieces=1,cut=True,copy=4096)
            if name=="ag":
                x=S.random_tensor(M//W,hid,seed=rank); w=S.random_tensor(inn//W,hid,seed=9+rank).T; out=torch.empty(M,inn//W,device="cuda",dtype=x.dtype)
                st=S.AllGatherMatmul.create(ctx,group,M=M,K=hid,columns=[inn//W],dtype=x.dtype,config=cfg); f=lambda dry=0: st(x,[w],out=[out],dry=dry)
            else:
                x=S.random_tensor(M,inn//W,seed=rank); w=S.random_tensor(hid,inn//W,seed=9+rank).T; out=torch.empty(M//W,hid,device="cuda",dtype=x.dtype)
                st=S.MatmulReduceScatter.create(ctx,group,M=M,N=hid,K=inn//W,dtype=x.dtype,config=cfg); f=lambda dry=0: st(x,w,out=out,dry=dry)
            f(1); torch.cuda.synchronize(); dist.barrier()
            keep=torch.zeros(12,16+8*256,dtype=torch.int32,device="cuda")
            def many():
                for i in range(12): f(); keep[i].copy_(st.workspace.state)
            many(); torch.cuda.synchronize(); dist.barrier()
            g=torch.cuda.CUDAGraph()
            with torch.cuda.graph(g,stream=torch.cuda.Stream()): many()
            for rep in range(3):
                dist.barrier(); handle.barrier(); g.replay(); torch.cuda.synchronize()
            t=keep[:,16:16+8*NS].view(12,NS,8).cpu().long()
            base=t[:,:,0].min(1).values
            lines=[f"rank {rank} {name} M{M}: launch: start spread | tiles/push end min..max | end min..max | next start gap"]
            for i in (2,5,6,9):
                r=(t[i]-base[i])
                gap=(base[i+1]-base[i]-r[:,2].max()).item()
                lines.append(f"   {i}: start {r[:,0].max()/1e3:.1f}  mid {r[:,1].min()/1e3:.1f}..{r[:,1].max()/1e3:.1f} (median {r[:,1].median()/1e3:.1f}) end {r[:,2].min()/1e3:.1f}..{r[:,2].max()/1e3:.1f} gap {gap/1e3:.1f} SMs {t[i,:,7].unique().numel()}")
            allb=[None]*W; dist.all_gather_object(allb,(base.tolist(),(t[:,:,2].max(1).values).tolist()))
            if rank in (0,1): q.put("\n".join(lines))
            if rank==0:
                q.put("    start skew between ranks us "+" ".join(f"{(max(b[0][i] for b in allb)-min(b[0][i] for b in allb))/1e3:.0f}" for i in range(12))+"   call times "+" ".join(f"{(allb[0][0][i+1]-allb[0][0][i])/1e3:.0f}" for i in range(11)))
    except BaseException:
        q.put(f"rank {rank} "+traceback.format_exc()[-2500:])
if __name__=="__main__":
    import multiprocessing as mp
    m=types.ModuleType("iris"); m.__path__=["iris"]; sys.modules["iris"]=m
    from iris.bench.mps import share_of, private_daemon
    d=patch()
    ctx=mp.get_context("spawn"); q=ctx.Queue()
    with private_daemon(W>1) as env:
        os.environ.update(env)
        if W>1: os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]=str(share_of(W))
        ps=[ctx.Process(target=worker,args=(r,q,29970+W,d)) for r in range(W)]
        [p.start() for p in ps]; t0=time.time()
        while any(p.is_alive() for p in ps) and time.time()-t0<LIMIT:
            time.sleep(.2)
            while not q.empty(): print(q.get(),flush=True)
        for p in ps:
            if p.is_alive(): p.kill(); print("killed",flush=True)
        while not q.empty(): print(q.get(),flush=True)
