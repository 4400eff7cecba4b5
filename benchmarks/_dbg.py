import os, sys, time, traceback, faulthandler, types
W=int(sys.argv[1]); LIMIT=float(sys.argv[2])
sys.path.insert(0,os.getcwd())
m=types.ModuleType("iris"); m.__path__=["iris"]; sys.modules["iris"]=m
os.environ.update(TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1",TORCH_SYMM_MEM_DISABLE_MULTICAST="1",TRITON_INTERPRET="0")
from iris.bench.mps import share_of, private_daemon
def worker(rank,q,port):
    try:
        import torch, torch.distributed as dist
        faulthandler.dump_traceback_later(LIMIT-5,exit=True)
        torch.cuda.set_device(0)
        os.environ.update(MASTER_ADDR="127.0.0.1",MASTER_PORT=str(port),RANK=str(rank),WORLD_SIZE=str(W),LOCAL_RANK=str(rank))
        dist.init_process_group("cpu:gloo,cuda:nccl",rank=rank,world_size=W)
        from iris.bench import stages as S
        from types import SimpleNamespace
        from iris.lower.kernels.config import GemmConfig
        ctx,group=SimpleNamespace(heap=S.SymmetricHeap()),S.World()
        sh,handle=S.symmetric(64*4096)
        M,K,N=64,4096,14336//W
        for (bm,bn,bk,w_,st_,p,cut) in ((64,128,128,4,4,4,True),(64,128,128,4,4,4,False),(64,128,128,4,4,1,True)):
            cfg=GemmConfig(bm,bn,bk,w_,st_,8,pieces=p,cut=cut,copy=4096)
            st=S.AllGatherMatmul.create(ctx,group,M=M,K=K,columns=[N],dtype=torch.bfloat16,config=cfg)
            w=S.random_tensor(N,K,seed=77+rank).T
            out=torch.full((M,N),float("nan"),device="cuda",dtype=torch.bfloat16)
            msgs=[]
            for it in range(6):
                xs=[S.random_tensor(M//W,K,seed=it*10+r) for r in range(W)]
                x=xs[rank]; X=torch.cat(xs)
                out.fill_(float("nan"))
                if it==0: st.warm(x,[w],out=[out]); torch.cuda.synchronize(); dist.barrier()
                st(x,[w],out=[out]); torch.cuda.synchronize(); dist.barrier()
                ref=(X@w).float()
                e=(out.float()-ref).view(M,-1,min(bn,32)).norm(dim=(0,2))/ref.view(M,-1,min(bn,32)).norm(dim=(0,2))
                g=(st.gathered[(it%2)*M:(it%2+1)*M]==X).all().item()
                bad=(~(e<1e-2)).nonzero().flatten().tolist()
                if bad or not g: msgs.append(f"it{it} gathered {g} bad pieces {len(bad)} {bad[:12]} {[round(v,3) for v in e[bad[:6]].tolist()]}")
            q.put(f"W{W} rank {rank} {bm} {p} {cut}\n  "+"\n  ".join(msgs)+f"")
            dist.barrier()
    except BaseException:
        q.put(f"rank {rank} "+traceback.format_exc()[-2500:])
if __name__=="__main__":
    import multiprocessing as mp
    ctx=mp.get_context("spawn"); q=ctx.Queue()
    with private_daemon(W>1) as env:
        os.environ.update(env)
        if W>1: os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]=str(share_of(W))
        ps=[ctx.Process(target=worker,args=(r,q,29990+W)) for r in range(W)]
        [p.start() for p in ps]; t0=time.time()
        while any(p.is_alive() for p in ps) and time.time()-t0<LIMIT:
            time.sleep(.2)
            while not q.empty(): print(q.get(),flush=True)
        for p in ps:
            if p.is_alive(): p.kill(); print("killed",flush=True)
        while not q.empty(): print(q.get(),flush=True)
