"""`vllm-santa tune`: measure the decode methods on this GPU over context and batch, and write the policy that follows from it."""
