"""What the package's programs take on one GPU, beside what the planner predicts.

    python -m experiments.benchmark --config=configs/benchmark_gpu.py
    python -m experiments.benchmark --config=configs/benchmark_gpu.py --config.tiny=True

Cost: at most eight minutes. Expected: docs/measurements.md, "An NVIDIA H100". What fails or takes
too long is left out, and the rest goes on. The second command runs the same code on small shapes on
any device; its times mean nothing.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the config; sizes are in tokens and rows."""
    config = ConfigDict()
    config.tiny = False  # take small sizes instead, on whatever device there is
    config.chip = ""  # whose published figures are compared with, such as "h100"; "": the device's
    config.seconds = 450  # of all parts; those that it does not suffice for are left out
    config.num_draft = ConfigDict({"eagle3": 4, "dflash": 7, "ngram": 4})  # K of each method
    config.conditional_rate = 0.7  # synthetic acceptance of every position
    config.repeats = 5  # timings, whose median counts
    config.sizes = ConfigDict(
        {
            "target": "llama-3.1-8b",  # the preset whose shape is used, with random weights
            "heads": {
                "eagle3": {"draft_vocab_size": 32000},  # ids that it proposes
                "dflash": {"num_layers": 5},  # its own
            },
            "slots": 2048,  # of the caches
            "rounds": 32,  # of a timed call
            "batches": (8, 64),  # rows that are decoded together, beside one
            "prompts": (1300, 700, 300, 100),  # lengths of prompts that are fed together
            "texts": 16,  # prompts of which text is decoded
            "new_tokens": 64,  # of each text
            "length": 2048,  # of the window of a training step
            "matrix": 8192,  # rows and columns of the matrices whose product and copy are timed
        }
    )
    return config
