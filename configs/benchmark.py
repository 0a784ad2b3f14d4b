"""What speculation costs and gains, as ratios measured within one run, each with a bar.

    python -m experiments.benchmark
    python -m experiments.benchmark --parts=llama110m --config.llama110m.k=2
    python -m experiments.benchmark --peers --config.transformers.python=PATH

Cost: minutes on two quiet CPU cores. Expected: most bars are met on jax 0.12; the newest figures
are in docs/measurements.md.
"""

from ml_collections import ConfigDict

from configs import train_zoo_eagle3, train_zoo_target


def get_config() -> ConfigDict:
    """Returns the config; lengths are in tokens, and ``repeats`` are interleaved."""
    config = ConfigDict()
    config.llama110m = ConfigDict(
        {
            "target": {  # 109,529,856 parameters, the head tied to the embedding
                "vocab_size": 32000,  # ids
                "hidden_size": 768,  # width
                "intermediate_size": 2048,  # width within the feed-forward layers
                "num_hidden_layers": 12,  # layers
                "num_attention_heads": 12,  # query heads
                "num_key_value_heads": 12,  # key-value heads
                "max_position_embeddings": 1024,  # maximum tokens of a text
                "tie_word_embeddings": True,  # whether embedding and output share their weights
            },
            "draft": {  # 9,774,336 parameters
                "vocab_size": 32000,
                "hidden_size": 256,
                "intermediate_size": 688,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "max_position_embeddings": 1024,
                "tie_word_embeddings": True,
            },
            "slots": 1024,  # of the cache
            "prompt_tokens": 64,  # of every prompt
            "new_tokens": 96,  # of every output
            "k": 4,  # drafted tokens a round
            "conditional_rate": 0.8,  # acceptance of every position
            "repeats": 5,  # interleaved timings, whose median counts
            "seed": 0,  # of random weights and prompts
        }
    )
    language, head = train_zoo_target.get_config(), train_zoo_eagle3.get_config()
    config.training = ConfigDict(
        {  # as the zoo's own models are trained
            "target": _shape(language),
            "lm_batch": language.batch,  # windows of a step of the language model
            "draft_vocab_size": head.head.draft_vocab_size,
            "num_steps": head.loss.num_steps,  # K of training-time test
            "batch": head.batch,  # windows of a step of the head
            "length": language.length,  # tokens of a window
            # See configs/train_head_default.py; a step is of one batch.
            "optimizer": {k: v for k, v in head.optimizer.items() if k != "accumulate"},
            "repeats": 5,
            "seed": 0,
        }
    )
    config.peers = ConfigDict(
        {
            "target": "zoo/target",  # a zoo name or a directory
            "draft": "zoo/draft",  # likewise; "": none
            "data": "",  # prompts, as in experiments.evaluate; "": held-out functions
            "num_prompts": 8,
            "max_prompt_tokens": 256,  # longer prompts lose their beginning
            "new_tokens": 96,
            "ks": (1, 3),  # drafted tokens a round, on both sides
            "dtypes": "float32,bfloat16",  # of weights and caches, on both sides
            "head": "zoo/eagle3",  # a zoo name or a directory; "": none
            "repeats": 3,
        }
    )
    config.transformers = ConfigDict(
        {
            "python": ""  # the interpreter with torch and transformers; "": this one
        }
    )
    # The bars that the medians are compared with.
    config.bars = ConfigDict(
        {
            "verify": 1.35,  # verify pass over plain pass, of the large shape; at most
            "round": 1.10,  # round over its passes alone; at most
            "draft": 0.15,  # a token of a draft model over a target pass; at most
            "no_draft": 1.05,  # generate at K = 0 over a plain loop; at most
            "memory": 1.6,  # plain decoding of the large shape over reading its weights; at most
            "training": 0.5,  # FLOP rate of a step over that of its largest products; at least
            "peers": 4.0,  # tokens per second over transformers' assisted generation; at least
        }
    )
    return config


def _shape(train) -> dict:
    return {"vocab_size": train.vocab_size, **train.model.to_dict()}
