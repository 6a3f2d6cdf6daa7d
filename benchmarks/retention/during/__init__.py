"""Methods that act while a model trains, one file each."""

from retention.during import distillation, ewc, l2_sp, lower_rate, osf, plain, replay, self_rehearsal
from retention.method import During

METHODS: dict[str, During] = {
    method.name: method
    for method in (
        plain.METHOD,
        lower_rate.METHOD,
        l2_sp.METHOD,
        ewc.METHOD,
        distillation.METHOD,
        *self_rehearsal.METHODS,
        *replay.METHODS,
        osf.METHOD,
    )
}
