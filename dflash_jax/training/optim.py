"""AdamW with warm-up, schedule and clipping, from the recipe's `optim` group."""

import optax

from dflash_jax.config import OptimSection

WSD_DECAY = 0.2  # share of the steps in which `wsd` decays


def learning_rate(section: OptimSection, steps: int) -> optax.Schedule:
    """Linear from 0 to the peak over the first `warmup` share of `steps`, then the schedule's own way.

    cosine: to 0 at the last step; wsd: stable, then linear to 0 over the last fifth; constant.
    """
    warmup = round(section.warmup * steps)
    rise = optax.linear_schedule(0.0, section.lr, max(warmup, 1))
    if section.schedule == "cosine":
        after = optax.cosine_decay_schedule(section.lr, max(steps - warmup, 1))
    else:
        after = optax.constant_schedule(section.lr)
    if section.schedule == "wsd":
        decay = min(round(WSD_DECAY * steps), steps - warmup)
        fall = optax.linear_schedule(section.lr, 0.0, max(decay, 1))
        return optax.join_schedules([rise, after, fall], [warmup, steps - decay])
    return optax.join_schedules([rise, after], [warmup])


def make_optimizer(section: OptimSection, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Clip the (already normalised) gradient by its global norm, then AdamW; both moments in float32.

    The learning rate of the last update stands in its state under the name "learning_rate".
    """
    fixed = ("b1", "b2", "eps", "weight_decay")
    adamw = optax.inject_hyperparams(optax.adamw, static_args=fixed)(
        learning_rate=schedule,
        b1=section.b1,
        b2=section.b2,
        eps=section.eps,
        weight_decay=section.weight_decay,
    )
    return optax.chain(optax.clip_by_global_norm(section.clip_norm), adamw)
