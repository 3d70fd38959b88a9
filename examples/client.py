"""Ask a running server, with a method and a budget of this request's own.

vllm serve MODEL --attention-backend santa
python examples/client.py
"""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    max_tokens=32,
    temperature=0,
    # Leave any of them out, and the server's policy decides.
    extra_body={"vllm_xargs": {"santa_method": "pps", "santa_budget": 256, "santa_seed": 1}},
)
print(answer.choices[0].message.content)
