"""A small EAGLE-3 head for the zoo's target, in minutes on two cores.

    python -m experiments.train_head --workdir=runs/my_head

Trains on the standard library's source alone. Cost: about four minutes on two CPU cores, one of
them for compilation. Expected: the held-out loss falls and tau, printed at each evaluation, rises.

Every value can be set on the command line, in the type that it has here:

    --config.target=PATH --config.data.text=chats.jsonl    another target, conversations or texts
    --config.objective=eagle1                              or peagle, mtp, dflash, dspark, ...
    --config.data.responses=FILE                           of experiments.regenerate
    --config.head.init_from=PATH                           fine-tune an existing head
    --config.steps=2000 --config.optimizer.name=adamw --config.optimizer.lr=1e-4
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """Returns the config; sizes are in tokens and steps, learning rates are peak rates."""
    config = ConfigDict()
    config.seed = 0  # of the first weights and of the order of the data
    config.target = "zoo/target"  # or a Hugging Face directory, or a hub id
    # Of the computation; trained parameters stay float32. Empty: float32 on a CPU, else bfloat16.
    config.dtype = ""
    config.scan_layers = placeholder(bool)  # stack the target's layers; by default on TPUs
    config.attention = "auto"  # of the target; "xla": without a TPU's kernel for whole sequences
    config.mesh = ""  # devices to train on together, such as data:4,tensor:2; empty: one
    config.is_fully_sharded = False  # split weights and optimizer states over the data axis too
    config.objective = "eagle3"  # eagle1, eagle3, peagle, mtp, dflash, dflash2, dspark, treeflash
    config.head = ConfigDict(
        {
            # U, for eagle3 and peagle: the most frequent tokens of the data; 0: all
            "draft_vocab_size": 0,
            "taps": (),  # of the target, see spec_jax.models.transformer.forward; (): as published
            # For eagle3 and peagle: normalise the start of the residual stream.
            "norm_before_residual": False,
            "fc_norm": False,  # for eagle3 and peagle: normalise each tapped state, as EAGLE-3.1
            "norm_output": False,  # for eagle3: normalise the recycled state, as EAGLE-3.1 does
            # Begin with the target's last layer and output head; eagle1 and eagle3 with the linear
            # map that predicts best on the first batches.
            "is_warm_start": True,
            "init_from": "",  # a zoo name or directory of a head to continue from
            # With init_from: choose the ids of a reduced vocabulary of the same size anew, from
            # this data. Output weights of ids that the head did not draft begin as the target's.
            "has_new_ids": False,
            "num_modules": 1,  # for mtp
            "protocol": "recycled",  # for mtp: one module for all; "sequential": one for each
            "num_layers": 0,  # of block drafters, 0: two; of peagle, 0: four
            "max_draft": 0,  # for peagle: the drafts that it is trained for; 0: eight
            "block_size": 0,  # tokens of their blocks; 0: eight
            "markov_rank": 0,  # for dspark: of the bias by the token before; 0: 256
            # For dflash2, 0: 256, 16, 2 and 16
            "selector_rank": 0,  # of the scores of pairs
            "selector_top_k": 0,  # candidates
            "conv_kernel_size": 0,  # tokens that a convolution mixes
            "conv_group_size": 0,  # channels that share what a state adds to their taps
        }
    )
    config.loss = ConfigDict(
        {
            "num_steps": 3,  # K of training-time test
            "decay": 0.8,  # step j has weight decay ** j
            "divergence": "cross-entropy",  # for eagle3, peagle, see spec_jax/train/losses.py
            "floor": 0.2,  # for peagle: no draft weighs less
            "labels": "target",  # for mtp: the target's distribution; or "text"
            "noise": 0.0,  # added to the features of eagle1
            "feature_weight": 1.0,  # for eagle1
            "token_weight": 0.1,  # for eagle1
            "num_anchors": 32,  # blocks or masked pairs of a window, drawn anew in every step
            # For dflash, dflash2, dspark and treeflash:
            "slot_weights": "decay",  # or "dpace": by how often the chain gets that far
            "text_weight": placeholder(float),  # of the text's tokens; by default the objective's
            "target_weight": placeholder(float),  # of the target's distribution
            "base_weight": placeholder(float),  # of the same, not knowing the token before
            "l1_weight": placeholder(float),  # of the L1 distance to the target's distribution
            "confidence_weight": placeholder(float),  # of dspark's confidence
            # Recompute activations in the backward pass, not store them; default: on accelerators.
            "is_remat": placeholder(bool),
        }
    )
    config.data = ConfigDict(
        {
            # "stdlib", the library's source; or files and folders, comma-separated. By default the
            # library's source, or of another target than the zoo's its responses alone, as "" does.
            "text": placeholder(str),
            "text_share": 0.5,  # of the windows that are text, not responses
            "tests_share": 0.25,  # of the standard library's own tests
            "held_out_share": 0.02,  # of files' documents or, without text, of responses
            # Variables of the chat template, as JSON: {"enable_thinking": false}; empty: none.
            "chat_template_kwargs": "",
            "max_length": 0,  # longer documents of files are left out; 0: none, windows cut them
            # A token sees its own document alone, whose positions begin at 0, as in decoding. Off:
            # all before it in its window, as the zoo's heads were trained. Targets that keep a
            # state of all tokens, such as Mamba-2, cannot.
            "has_document_masks": False,
            "responses": placeholder(str),  # a JSONL file of experiments.regenerate
            "responses_share": 0.5,  # of the windows that are responses
            # Count the training loss on the responses' prompts, too (held-out ones count answers
            # alone): for prompts that the target wrote.
            "has_prompt_loss": False,
            "view_cache": placeholder(str),  # a folder that keeps the target's states
            "view_cache_gb": 10.0,  # its maximum size
        }
    )
    config.steps = 150  # training steps of the whole run
    # Time of the run without its last evaluation: as many steps as fit, at most ``steps``. Measured
    # when the run begins; a run that goes on has the steps that it was begun with.
    config.minutes = placeholder(float)
    config.batch = 4  # windows that are computed together
    config.length = 258  # tokens of a window, of which all but two are trained on
    config.optimizer = ConfigDict(
        {
            "name": "muon",  # muon or adamw
            "lr": 3e-3,  # peak rate of adamw, and in muon of what is no matrix
            "matrix_lr": 0.02,  # peak rate of muon's matrices
            "warmup": 20,  # updates of rising rates
            "decay_share": 0.6,  # the last part of the run, with falling rates
            "weight_decay": 0.0,  # share that an update takes off the weights, times the rate
            "clip": 0.5,  # maximum norm of the gradient
            "accumulate": 1,  # batches of a step, computed one by one; the update is that of all
        }
    )
    config.eval = ConfigDict(
        {
            "every": 50,  # steps; 0: only at the end
            "num_draft": 5,  # K when tau is measured
            "prompts": "",  # a file of rows, see docs/train_a_head.md; "": of the held-out text
            "prompt_tokens": 256,  # maximum tokens of a prompt of the held-out text
            "num_prompts": 16,  # texts that tau is measured on; 0: no evaluation
            "max_new_tokens": 64,  # output tokens of each
            "batch": 16,  # of them decoded together
            "windows": 16,  # held-out windows for loss and teacher-forced acceptance
        }
    )
    config.log_every = 10  # steps between two lines of metrics.jsonl
    config.checkpoint_every_s = 120.0  # seconds between two checkpoints
    # For eagle3 SpecForge, EAGLE-3 or speculators; for peagle SpecForge or speculators; for dflash
    # z-lab, DeepSpec or speculators; for dflash2 z-lab or speculators; for dspark DeepSpec or
    # speculators. Empty: the first that can express the head.
    config.export_format = ""
    config.export_dtype = "bfloat16"  # of the stored tensors
    # For mtp: also a copy of the target's directory, model/, with the modules in place of its own.
    config.export_with_target = False
    config.export_from = "best"  # the state with the highest tau; or "last"
    return config
