"""Which torch this is, and the GPUs it can use."""

import json

import torch


def main() -> None:
    failure, devices = "", []
    if torch.version.cuda:
        try:
            torch.cuda.init()
            devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        except (RuntimeError, AssertionError) as reason:
            failure = str(reason).splitlines()[0]
    print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "devices": devices, "failure": failure}))


if __name__ == "__main__":
    main()
