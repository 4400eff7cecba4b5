"""First trial on the GPU: python benchmarks/_run1.py W"""
import os, sys, time, traceback, threading, faulthandler
W=int(sys.argv[1]); LIMIT=float(sys.argv[2])
sys.path.insert(0,os.getcwd())
os.environ.update(TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1",TORCH_SYMM_MEM_DISABLE_MULTICAST="1",TRITON_INTERPRET="0")
from iris.bench.mps import share_of, private_daemon
def worker(rank,q,port):
    try:
        import torch, torch.distributed as dist
        faulthandler.dump_traceback_later(LIMIT-5,exit=True)
        torch.cuda.set_device(0)
        os.environ.update(MASTER_ADDR="127.0.0.1",MASTER_PORT=str(port),RANK=str(rank),WORLD_SIZE=str(W),LOCAL_RANK=str(rank))
        dist.init_process_group("cpu:gloo,cuda:nccl",rank=rank,world_size=W)
        import iris; iris.iris(4<<30)
        from iris.bench.stages import measure
        if rank==0: q.put(f"W={W} SMs={torch.cuda.get_device_properties(0).multi_processor_count}")
        for stage,model,M in [(a,b,int(c)) for a,b,c in (t.split(":") for t in sys.argv[3].split(","))]:
            rows=[]
            t=time.time()
            for row in measure(stage,model,M,True): rows.append(row)
            if rank==0:
                g=[r for r in rows if r.name=="gemm"][0].time.median
                q.put(f"{stage} {model} M{M} K{rows[0].K} N{rows[0].N}  ({time.time()-t:.0f}s)")
                for r in sorted(rows,key=lambda r:r.time.median): q.put(f"     {r.name:28s} {r.time.median:8.1f} us  {r.time.median/g:.3f}   [{r.time.low:.0f} {r.time.high:.0f}]")
    except BaseException:
        q.put(f"rank {rank} "+traceback.format_exc()[-2500:])
if __name__=="__main__":
    import multiprocessing as mp
    ctx=mp.get_context("spawn"); q=ctx.Queue()
    with private_daemon(W>1) as env:
        os.environ.update(env)
        if W>1: os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]=str(share_of(W))
        ps=[ctx.Process(target=worker,args=(r,q,29950+W)) for r in range(W)]
        [p.start() for p in ps]; t0=time.time()
        while any(p.is_alive() for p in ps) and time.time()-t0<LIMIT:
            time.sleep(.2)
            while not q.empty(): print(f"[{time.time()-t0:5.0f}]",q.get(),flush=True)
        for p in ps:
            if p.is_alive(): p.kill(); print("killed",flush=True)
        while not q.empty(): print(q.get(),flush=True)
