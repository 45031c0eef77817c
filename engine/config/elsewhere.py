"""Map names of other trainers to keys: TRL and Hugging Face's Trainer, verl, slime and Megatron-LM.

These are the names that people type. `isoloss.tools.migrate` translates whole configurations, with their values.
"""

import re

# Last parts of names, without the groups before them, by key. A name that needs several keys is at the first of them.
NAMES = {
    "model.path": "model_name_or_path hf_checkpoint pretrained_model_name_or_path",
    "model.tokenizer": "tokenizer_name tokenizer_path",
    "data.train": "dataset dataset_name dataset_path train_file train_files train_data_path prompt_data",
    "data.eval": "val_files eval_data validation_file",
    "data.max_length": "max_seq_length max_seq_len max_prompt_length seq_length cutoff_len",
    "data.columns": "prompt_key input_key label_key dataset_text_field dataset_prompt_column",
    "data.system": "system_prompt default_system",
    "data.template_kwargs": "chat_template_kwargs",
    "batch.global_size": "batch_size global_batch_size train_batch_size rollout_batch_size",
    "batch.max_tokens": (
        "micro_batch_size micro_batch_size_per_gpu per_device per_device_train_batch_size "
        "per_device_eval_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu max_tokens_per_gpu "
        "gradient_accumulation_steps"
    ),
    "parallel.tp": "tensor_model_parallel_size tensor_parallel_size",
    "parallel.pp": "pipeline_model_parallel_size pipeline_parallel_size",
    "parallel.vpp": "virtual_pipeline_model_parallel_size",
    "parallel.ulysses": "context_parallel_size ulysses_sequence_parallel_size cp sp",
    "parallel.ep": "expert_model_parallel_size",
    "parallel.etp": "expert_tensor_parallel_size",
    "parallel.distributed_optimizer": "use_distributed_optimizer",
    "memory.recompute": "gradient_checkpointing enable_gradient_checkpointing recompute_granularity",
    "memory.offload_optimizer": "optimizer_cpu_offload optimizer_offload",
    "loss.aggregation": "loss_agg_mode",
    "optim.lr": "learning_rate",
    "optim.clip": "max_grad_norm grad_clip clip_grad",
    "optim.schedule": "lr_scheduler_type lr_decay_style",
    "optim.warmup_steps": "lr_warmup_steps lr_warmup_iters warmup_ratio",
    "optim.betas": "adam_beta1 adam_beta2",
    "optim.eps": "adam_epsilon",
    "train.steps": "max_steps train_iters num_rollout total_training_steps",
    "train.epochs": "num_train_epochs num_epoch total_epochs",
    "train.precision": "bf16 fp16 dtype torch_dtype",
    "train.eval_every": "eval_steps eval_interval test_freq",
    "checkpoint.every": "save_steps save_interval save_freq save_strategy",
    "checkpoint.keep": "save_total_limit max_ckpt_to_keep",
    "checkpoint.resume": "resume_from_checkpoint resume_mode",
    "output_dir": "save_dir default_local_dir",
    "rollout.backend": "use_vllm",
    "rollout.num_generations": "n n_samples_per_prompt",
    "rollout.max_new_tokens": "max_completion_length max_response_length rollout_max_response_len",
    "rollout.temperature": "rollout_temperature",
    "algorithm.advantage": "adv_estimator advantage_estimator",
    "algorithm.loss": "loss_type",
    "algorithm.clip_low": "epsilon eps_clip clip_ratio clip_ratio_low",
    "algorithm.clip_high": "epsilon_high eps_clip_high clip_ratio_high",
    "algorithm.dual_clip": "clip_ratio_c",
    "algorithm.kl_coef": "beta kl_loss_coef",
    "algorithm.kl_estimator": "kl_loss_type",
    "algorithm.entropy_coef": "entropy_coeff",
    "algorithm.epochs": "num_iterations ppo_epochs",
    "algorithm.minibatches": "ppo_mini_batch_size",
    "algorithm.mask_truncated": "mask_truncated_completions",
    "reward.function": "reward_funcs reward_fn rm_type",
    "reward.weights": "reward_weights",
}
KEYS_BY_NAME = {name: key for key, names in NAMES.items() for name in names.split()}
# Explanation by a word of a name that has no key.
WITHOUT_A_KEY = {
    **dict.fromkeys(("lora", "qlora", "peft", "adapter"), "there are no adapters yet: all weights are trained"),
    **dict.fromkeys(
        ("logger", "wandb", "mlflow", "swanlab", "trackio", "tensorboard", "report_to", "logging_dir"),
        "every run writes metrics.jsonl and files of TensorBoard into output_dir, and there are no other loggers",
    ),
    **dict.fromkeys(("packing", "use_dynamic_bsz"), "rows are always packed, up to batch.max_tokens"),
    **dict.fromkeys(("deepspeed", "fsdp"), "a model is divided by parallel.* and its optimizer by data-parallel ranks"),
}


def key_of(name: str) -> str | None:
    """Return the key for a name of another trainer, which may have that trainer's groups before it."""
    return KEYS_BY_NAME.get(name.rsplit(".", 1)[-1])


def explanation(name: str) -> str | None:
    """Return why there is no key for a name, if the name has a known word."""
    parts = name.split(".")
    words = [*parts, *re.split(r"[._]", name)]
    return next((WITHOUT_A_KEY[word] for word in words if word in WITHOUT_A_KEY), None)
