"""The probe of published weights on their quantized version: its outputs are recorded again there.

A memory that is loaded onto a quantized base has that base as its mean (`limpet.methods.quantized_base`). Its probe has
the outputs of the unquantized model, from which the base differs before any training: by 0.38 nats per token for
SmolLM2-135M in NF4 (decision 27). The drift that training causes is measured from the outputs of the base itself.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from limpet.forgetting.probe import Probe
from limpet.likelihoods import Likelihood
from limpet.model import Forward, preserve_state, replaced
from limpet.model.adapter_switch import adapters_off
from limpet.posterior import Posterior


def at_quantized_base(probe: Probe, posterior: Posterior, likelihood: Likelihood, forward: Forward | None) -> Probe:
    """Return a probe with the outputs of the memory's mean if that is a quantized base and the probe has others.

    Args:
        probe: The probe.
        posterior: The posterior of the memory. The state of its model is preserved.
        likelihood: The likelihood of the outputs.
        forward: The forward function that the probe was recorded with.

    Returns:
        The probe itself if it was recorded on a quantized model, or if no weight of the memory is quantized.
    """
    if probe.quantized or not posterior.quantized:
        return probe
    model, parameters = posterior.model, posterior.parameters()
    generator = torch.Generator().manual_seed(0)  # samples labels of a large vocabulary
    before = {
        name: value
        for held in posterior.held.values()
        if held.tasks
        for name, value in held.block.scatter(held.mean).items()
        if name not in posterior.quantized
    }
    with (
        preserve_state(model),
        torch.no_grad(),
        adapters_off(model),
        probe.through_head(model),
        replaced(parameters, before),
    ):
        found = [one.summaries[0] for one in probe.with_outputs_of(model, likelihood, forward, generator)]
    summaries = [{name: tensor.cpu() for name, tensor in summary.items()} for summary in found]
    return replace(probe, summaries=summaries, quantized=True)
