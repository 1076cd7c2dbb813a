"""A plain PyTorch loop over clients on the work of `peers.py`. usage: plain.py FOLDER DEVICE"""

import sys
import time

import torch
import work


def main(folder: str, device: str) -> None:
    job = work.read(folder, device)
    module = job.module()
    local = job.module()
    times = [time.time()]
    for cohort in job.cohorts:
        total = [torch.zeros_like(parameter) for parameter in module.parameters()]
        for user in cohort:
            local.load_state_dict(module.state_dict())
            work.train(local, job, user)
            with torch.no_grad():
                torch._foreach_add_(total, list(local.parameters()))
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), total):
                parameter.copy_(value / len(cohort))
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.time())
    work.finish(folder, times, module)


if __name__ == "__main__":
    main(*sys.argv[1:])
