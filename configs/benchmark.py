"""What speculation costs and gains, as ratios measured within one run, each with a bar.

    python -m experiments.benchmark
    python -m experiments.benchmark --parts=cpu_layout --config.cpu_layout.tokens=1,4
    python -m experiments.benchmark --peers --config.transformers.python=PATH

Cost: over an hour on two quiet CPU cores, 42 minutes of it for the part "adaptive". Expected: most
bars are met on jax 0.12; the figures by processor are in the documentation on measurements.
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
            "plain_tokens": 24,  # decoded by each plain loop that is tried
            "k": 4,  # drafted tokens a round
            "conditional_rate": 0.8,  # acceptance of every position
            "repeats": 5,  # interleaved timings, whose median counts
            "seed": 0,  # of random weights and prompts
        }
    )
    config.heads = ConfigDict(
        {
            "target": config.llama110m.target.to_dict(),
            "draft_vocab_size": 8000,  # of the head
            "k": 5,  # of the chain
            "tree_nodes": (15, 29, 44, 59),  # sizes of the dynamic tree, without the root
            "tree_depth": 6,  # levels of the dynamic tree
            "tree_top_k": 10,  # nodes that each level expands
            "slots": 1024,
            "prompt_tokens": 64,
            "repeats": 5,
            "seed": 0,
        }
    )
    language, head = train_zoo_target.get_config(), train_zoo_eagle3.get_config()
    config.blocks = ConfigDict(
        {
            "shapes": "zoo,llama110m",  # of the next two
            "zoo": _shape(language),
            "llama110m": config.llama110m.target.to_dict(),
            "num_layers": 2,  # of the head
            "markov_rank": 128,  # of its bias
            "k": 7,  # drafted tokens a round
            "slots": 1024,
            "prompt_tokens": 500,  # as full as the caches of the parts are
            "repeats": 15,
            "seed": 0,
        }
    )
    config.streaming = ConfigDict(
        {
            "target": config.llama110m.target.to_dict(),
            "draft": config.llama110m.draft.to_dict(),
            "prompt_tokens": 64,
            "new_tokens": 192,
            "k": 4,
            "conditional_rate": 0.8,
            "repeats": 5,
            "seed": 0,
        }
    )
    config.cpu_layout = ConfigDict(
        {
            "targets": "zoo/target,llama110m",  # zoo names, directories, or the next shape
            "shape": config.llama110m.target.to_dict(),  # of "llama110m", with random weights
            "dtypes": "float32,bfloat16",  # of weights and caches
            "tokens": (1, 2, 4, 5, 6, 9, 16),  # of a pass
            "slots": 384,
            "repeats": 9,
            "seed": 0,
        }
    )
    config.states = ConfigDict(
        {
            "target": {  # 69,760,608 parameters, half the depth of the published 130M
                "vocab_size": 32000,
                "hidden_size": 768,
                "num_hidden_layers": 12,
                "num_heads": 24,  # heads of the state
                "head_dim": 64,  # width of a head
                "state_size": 128,  # of each channel
                "n_groups": 1,  # heads that share their inputs, in so many groups
                "tie_word_embeddings": True,
            },
            "k": 4,
            "conditional_rate": 0.8,  # of every position
            "slots": 512,
            "prompt_tokens": 64,
            "repeats": 7,
            "seed": 0,
        }
    )
    config.slots = ConfigDict(
        {
            "families": "attention,hybrid,latent",  # of the next three
            "attention": _shape(language),
            "hybrid": {
                "vocab_size": 4096,
                "hidden_size": 256,
                "intermediate_size": 768,
                "num_hidden_layers": 4,  # of which the last one attends
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "linear_num_key_heads": 4,  # of the delta nets
                "linear_num_value_heads": 8,  # likewise
                "linear_key_head_dim": 32,  # numbers of a key
                "linear_value_head_dim": 32,  # numbers of a value
            },
            "latent": {
                "vocab_size": 4096,
                "hidden_size": 256,
                "intermediate_size": 768,
                "num_hidden_layers": 3,
                "num_attention_heads": 8,
                "q_lora_rank": 192,  # width of a query's latent
                "kv_lora_rank": 128,  # width of a slot's latent
                "qk_nope_head_dim": 32,  # width of a key, but for
                "qk_rope_head_dim": 32,  # ... its rotated part
                "v_head_dim": 32,  # width of a value
            },
            "few": 1024,  # slots of the short cache
            "many": 16384,  # and of the long one
            "prompt_tokens": 256,
            "k": 4,
            "conditional_rate": 0.8,  # of every position
            "rounds": 16,  # of one timing
            "repeats": 9,
            "seed": 0,
        }
    )
    config.adaptive = ConfigDict(
        {
            "target": config.llama110m.target.to_dict(),
            "draft": config.llama110m.draft.to_dict(),
            "buckets": (0, 1, 2, 3, 4, 6, 8),  # the Ks that may be chosen
            "rates": (0.0, 0.25, 0.5, 0.75, 1.0),  # of every position
            "batches": (1, 4, 16),  # prompts decoded together
            "slots": 1024,
            "prompt_tokens": 64,
            "rounds": 96,  # per timing
            "repeats": 3,
            "seed": 0,
        }
    )
    config.training = ConfigDict(
        {  # as the zoo's own models are trained
            "target": _shape(language),
            "lm_batch": language.batch,  # windows of a step of the language model
            "draft_vocab_size": head.head.draft_vocab_size,
            "num_steps": head.loss.num_steps,  # K of training-time test
            "batch": head.batch,  # windows of a step of the head
            "length": language.length,  # tokens of a window
            "optimizer": head.optimizer.to_dict(),  # see configs/train_head_default.py
            "repeats": 5,
            "seed": 0,
        }
    )
    config.peers = ConfigDict(
        {
            "target": "zoo/target",  # a zoo name or a directory
            "draft": "zoo/draft",  # likewise
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
            "round": 1.10,  # round over the sum of its parts; at most
            "head_round": 1.10,  # the same of a head's chain; at most
            "tree_round": 1.15,  # the same of a dynamic tree; at most
            "block_round": 1.15,  # a round that drafts a block over its three passes; at most
            "streaming": 1.10,  # streaming over one uninterrupted loop; at most
            "replay": 1.15,  # a round that replays its window over the verify pass alone; at most
            "slots": 1.10,  # a round's processor time in a long cache over a short one; at most
            "predicted": 0.95,  # measured over predicted; at least
            "draft": 0.15,  # a token of a draft model over a target pass; at most
            "no_draft": 1.05,  # generate at K = 0 over the fastest plain loop; at most
            "memory": 1.6,  # plain decoding of the large shape over reading its weights; at most
            "adaptive_plain": 1.03,  # adaptive over plain, by the table of costs; at most
            "adaptive_fixed": 0.95,  # best fixed K over adaptive, by the table of costs; at least
            "adaptive_clock": 1.10,  # adaptive over either, by the clock; at most
            "training": 0.5,  # FLOP rate of a step over that of its largest products; at least
            "peers": 4.0,  # tokens per second over transformers' assisted generation; at least
        }
    )
    return config


def _shape(train) -> dict:
    return {"vocab_size": train.vocab_size, **train.model.to_dict()}
