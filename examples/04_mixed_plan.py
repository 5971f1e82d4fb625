"""4. A mixed plan: GPUs of two kinds on one job, who computes what and who holds what."""

import drystone

plans = drystone.plan("llama-3-8b", "8xA100-80G,8xV100-32G").plans
for plan in plans[:3]:
    gpus = " + ".join(f"{count} {gpu}" for gpu, count in plan.gpus.items())
    print(f"{plan.way}: {gpus}: {plan.tokens_per_second:,.0f} tokens/s")
print("because:", plans[0].reason)
uneven = next(plan for plan in plans if plan.way == "uneven")
for share in uneven.stages[0].ranks:
    print(f"each {share.gpu}: {share.batch} sequences, {share.state_share:.1%} of the state")
