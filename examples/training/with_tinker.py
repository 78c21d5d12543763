"""Trains by Tinker with its loss `gspo`: the service, or with `base_url` a server that takes it.

python examples/training/with_tinker.py NAME POLICY GROUPS STEPS MODEL
"""

from __future__ import annotations

import sys

import tinker
from step import Step, connected

from app.experience.adapters import tinker as samples

CLIP = (3e-4, 4e-4)


def update(client: tinker.TrainingClient, step: Step, learning_rate: float = 1e-5) -> None:
    data = [
        tinker.Datum(tinker.ModelInput.from_ints(one["model_input"]), one["loss_fn_inputs"])
        for one in samples.data(step.rows, clip=CLIP)
    ]
    client.forward_backward(data, loss_fn="gspo").result()
    client.optim_step(tinker.AdamParams(learning_rate=learning_rate)).result()


def main(name: str, policy: str, groups: int, steps: int, model: str) -> None:
    client = tinker.ServiceClient().create_lora_training_client(base_model=model)
    for number in range(steps):
        step = Step(connected(name, number, policy, "tinker"), groups)
        if not step.rows:  # nothing came of its groups
            continue
        update(client, step)
        print(client.save_weights_for_sampler(name=f"v{number + 1}").result().path)  # for the engine behind POLICY
        step.commit(f"v{number + 1}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
