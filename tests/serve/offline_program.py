"""What a user of vLLM's `LLM` writes, with two requests. Writes one JSON file: `offline_program.py MODEL OUTPUT`."""

import json
import sys
from pathlib import Path

from tiny_model import prompt
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError


def main() -> None:
    llm = LLM(sys.argv[1], attention_backend="santa", max_model_len=1024, dtype="float32", enforce_eager=True)
    santa = [{"santa_method": "pps", "santa_budget": 24, "santa_seed": 5}, {"santa_method": "topk", "santa_budget": "10%"}]
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, extra_args=args) for args in santa]
    outputs = llm.generate([{"prompt_token_ids": prompt(300, seed)} for seed in (600, 601)], params, use_tqdm=False)
    answers = [
        [list(output.outputs[0].token_ids), [next(iter(step.values())).logprob for step in output.outputs[0].logprobs]]
        for output in outputs
    ]
    refused = None
    try:
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(extra_args={"santa_budget": 0}), use_tqdm=False)
    except VLLMValidationError as error:
        refused = str(error)
    Path(sys.argv[2]).write_text(json.dumps({"answers": answers, "refused": refused}))


if __name__ == "__main__":
    main()
