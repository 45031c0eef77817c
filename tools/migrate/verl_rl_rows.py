"""The keys of verl's reinforcement learning, each with its default and what becomes of it."""

from isoloss.tools.migrate.table import NO_DISTILLATION, Row, Settings, changes, lost_images, none, to
from isoloss.tools.migrate.verl_rl import (
    BUFFERS,
    REWARDS,
    A,
    C,
    R,
    agent,
    bypass,
    distills,
    lora,
    lost_advantage,
    lost_clip,
    lost_kl,
    lost_policy,
    lost_ratio,
    mtp,
    rejects,
)

OPTIM, CORRECTION, VAL = f"{A}optim.", "algorithm.rollout_correction.", f"{R}val_kwargs."
MEGATRON = f"{A}megatron."
OVERRIDE = f"{MEGATRON}override_transformer_config."
BALANCING = "moe.aux_loss=sequence and moe.bias_update_rate balance experts, whatever the micro-batches (docs/moe.md)"
SERVERS = "isoloss starts no servers of vLLM: it generates in process, or on SGLang servers that you start and name "
SERVERS += "(rollout.backend=sglang, rollout.servers)"
BY_PLAN = "the plan decides micro-batches by batch.max_tokens, for every pass"
ONE_REFERENCE = (
    "the initial policy's weights change places with the policy's, on its layout (algorithm.reference_offload)"
)
MEMORY = "Megatron-Core's distributed optimizer and the memory.* keys instead of FSDP's"
LOGS = "metrics.jsonl and TensorBoard in output_dir"


def lost_top_p(s: Settings) -> str | None:
    if s.number(f"{R}top_p") == 1 and s.integer(f"{R}top_k") in (-1, 0):
        return None
    return "isoloss trains on samples of the whole vocabulary only: others would bias ratio, KL and gradient"


def lost_backend(s: Settings) -> str | None:
    return SERVERS if s(f"{R}name") is not None else None


def lost_truncation(s: Settings) -> str | None:
    named = s.text("data.truncation")
    return None if named == "error" else "prompts are never truncated: a longer one is an error, or data.overlong=drop"


def lost_resume(s: Settings) -> str | None:
    return None if s("trainer.resume_mode") == "disable" else "isoloss starts anew unless checkpoint.resume=true"


def lost_schedule(key: str):
    def lost(s: Settings) -> str | None:
        known = s(key) in (None, "constant", "linear", "cosine")
        return None if known else "isoloss has constant, linear and cosine: give optim.schedule"

    return lost


def lost_both_kl(s: Settings) -> str | None:
    both = s.flag(f"{A}use_kl_loss") and s.flag("algorithm.use_kl_in_reward")
    return "isoloss has the divergence in the loss or in the reward: it is in the loss" if both else None


def lost_micro(s: Settings) -> str | None:
    dynamic = s.flag(f"{A}use_dynamic_bsz")
    return "verl itself does not read it with use_dynamic_bsz=true, but ppo_max_token_len_per_gpu" if dynamic else None


def lost_in_reward(s: Settings) -> str | None:
    read = s.flag("algorithm.use_kl_in_reward") and not s.flag(f"{A}use_kl_loss")
    return None if read else "verl itself reads it only with use_kl_in_reward=true"


def lost_penalty(s: Settings) -> str | None:
    return lost_in_reward(s) or lost_kl("algorithm.kl_penalty")(s)


def lost_threshold(s: Settings) -> str | None:
    text = s.text(f"{CORRECTION}rollout_is_threshold")
    return "isoloss truncates from above only: algorithm.importance_cap" if "_" in text else None


def lost_eval_temperature(s: Settings) -> str | None:
    greedy = not s.flag(f"{VAL}do_sample") and s.number(f"{VAL}temperature")
    return (
        "verl's evaluations are greedy without val_kwargs.do_sample=true, whatever this says: "
        "rollout.eval_temperature=0"
        if greedy
        else None
    )


def lost_importance(s: Settings) -> str | None:
    level = s(f"{CORRECTION}rollout_is")
    known = level in (None, "none", "token", "sequence")
    return None if known else "isoloss has importance weights by token and by sequence: algorithm.importance"


def lost_metric(s: Settings) -> str | None:
    named = s("algorithm.filter_groups.metric")
    same = named in (None, "seq_reward", "seq_final_reward", "score", "acc")
    return None if same else "isoloss drops groups whose rewards are all equal"


TRANSLATED = (
    to("actor_rollout_ref.model.path", "model.path", None, lost_images("actor_rollout_ref.model.path"), "result"),
    to("actor_rollout_ref.model.tokenizer_path", "model.tokenizer"),
    to("data.tokenizer", "model.tokenizer"),
    to("data.train_files", "data.train", []),
    to("data.val_files", "data.eval", []),
    to("data.train_batch_size", "batch.global_size algorithm.minibatches", 1024),
    to("data.max_prompt_length", "data.max_length", 512),
    to("data.max_response_length", "rollout.max_new_tokens data.max_length", 512),
    to("data.filter_overlong_prompts", "data.overlong", False),
    to("data.truncation", "data.overlong", "error", lost_truncation),
    to("data.apply_chat_template_kwargs", "data.template_kwargs"),
    to("data.seed", "train.seed"),
    to(f"{A}ppo_mini_batch_size", "algorithm.minibatches", 256),
    to(f"{A}ppo_epochs", "algorithm.epochs", 1),
    to(f"{A}ppo_micro_batch_size", "batch.max_tokens", None, lost_micro),
    to(f"{A}ppo_micro_batch_size_per_gpu", "batch.max_tokens", None, lost_micro),
    to(f"{A}use_dynamic_bsz", "batch.max_tokens", False),
    to(f"{A}ppo_max_token_len_per_gpu", "batch.max_tokens", 16384),
    to(f"{A}ulysses_sequence_parallel_size", "parallel.ulysses", 1),
    to(f"{A}fsdp_config.ulysses_sequence_parallel_size", "parallel.ulysses", 1),
    to(f"{MEGATRON}tensor_model_parallel_size", "parallel.tp", 1),
    to(f"{MEGATRON}pipeline_model_parallel_size", "parallel.pp", 1),
    to(f"{MEGATRON}virtual_pipeline_model_parallel_size", "parallel.vpp"),
    to(f"{MEGATRON}context_parallel_size", "parallel.ring", 1),
    to(f"{MEGATRON}expert_model_parallel_size", "parallel.ep", 1),
    to(f"{MEGATRON}expert_tensor_parallel_size", "parallel.etp"),
    to(f"{A}loss_agg_mode", "loss.aggregation loss.count_fully_masked", "token-mean"),
    to(f"{A}loss_scale_factor", "loss.norm_length"),
    to(f"{A}clip_ratio", "algorithm.clip_low algorithm.clip_high", 0.2, lost_clip),
    to(f"{A}clip_ratio_low", "algorithm.clip_low", 0.2),
    to(f"{A}clip_ratio_high", "algorithm.clip_high", 0.2),
    to(f"{A}clip_ratio_c", "algorithm.dual_clip", 3.0),
    to(f"{A}policy_loss.loss_mode", "algorithm.loss", "vanilla", lost_policy, "give"),
    to(f"{A}entropy_coeff", "algorithm.entropy_coef", 0),
    to(f"{A}use_kl_loss", "algorithm.kl_coef algorithm.kl_in", False),
    to(f"{A}kl_loss_coef", "algorithm.kl_coef", 0.001),
    to(f"{A}kl_loss_type", "algorithm.kl_estimator", "low_var_kl", lost_kl(f"{A}kl_loss_type"), "result"),
    to("algorithm.use_kl_in_reward", "algorithm.kl_in", False, lost_both_kl, "result"),
    to("algorithm.kl_penalty", "algorithm.kl_estimator", "kl", lost_penalty),
    to("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coef", 0.001, lost_in_reward),
    to("algorithm.adv_estimator", "algorithm.advantage", "gae", lost_advantage, "give"),
    to("algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage", True),
    to("algorithm.gamma", "algorithm.gamma", 1.0),
    to("algorithm.lam", "algorithm.gae_lambda", 1.0),
    to("algorithm.filter_groups.enable", "algorithm.dynamic_sampling", False),
    to("algorithm.filter_groups.max_num_gen_batches", "algorithm.max_draws"),
    to("algorithm.filter_groups.metric", "algorithm.dynamic_sampling", None, lost_metric, "result"),
    to(f"{CORRECTION}rollout_is", "algorithm.importance", None, lost_importance, "result"),
    to(f"{CORRECTION}rollout_is_threshold", "algorithm.importance_cap", 2.0, lost_threshold, "result"),
    to(f"{CORRECTION}bypass_mode", "algorithm.old_logprobs algorithm.importance", False),
    to(f"{OPTIM}lr", "optim.lr optim.min_lr", 1e-6),
    to(f"{OPTIM}min_lr", "optim.min_lr"),
    to(f"{OPTIM}min_lr_ratio", "optim.min_lr", 0.0),
    to(f"{OPTIM}lr_warmup_steps", "optim.warmup_steps", -1),
    to(f"{OPTIM}lr_warmup_steps_ratio", "optim.warmup_steps", 0.0, lost_ratio, "give"),
    *(to(f"{OPTIM}{name}", "optim.schedule", default, lost_schedule(f"{OPTIM}{name}"), "result")
      for name, default in (("lr_scheduler_type", "constant"), ("lr_decay_style", None), ("warmup_style", None))),
    to(f"{OPTIM}weight_decay", "optim.weight_decay", 0.01),
    to(f"{OPTIM}betas", "optim.betas", [0.9, 0.999]),
    to(f"{OPTIM}clip_grad", "optim.clip", 1.0),
    to(f"{A}grad_clip", "optim.clip", 1.0),
    to(f"{R}n", "rollout.num_generations", 1),
    to(f"{R}temperature", "rollout.temperature", 1.0),
    to(f"{R}top_p", "rollout.top_p", 1.0, lost_top_p, "result"),
    to(f"{R}top_k", "rollout.top_p", -1, lost_top_p, "result"),
    to(f"{R}do_sample", "rollout.temperature", True),
    to(f"{R}prompt_length", "data.max_length"),
    to(f"{R}response_length", "rollout.max_new_tokens"),
    to(f"{R}name", "rollout.backend", None, lost_backend),
    to(f"{VAL}temperature", "rollout.eval_temperature", 0, lost_eval_temperature),
    to(f"{VAL}do_sample", "rollout.eval_temperature", False),
    to(f"{VAL}top_p", "rollout.eval_top_p", 1.0),
    to("actor_rollout_ref.model.enable_gradient_checkpointing", "memory.recompute", True),
    to(f"{OVERRIDE}recompute_granularity", "memory.recompute"),
    to(f"{OVERRIDE}recompute_method", "memory.recompute_layers"),
    to(f"{OVERRIDE}recompute_num_layers", "memory.recompute_layers"),
    to("trainer.total_epochs", "train.epochs", 30),
    to("trainer.total_training_steps", "train.steps"),
    to("trainer.save_freq", "checkpoint.every", -1),
    to("trainer.test_freq", "train.eval_every", -1),
    to("trainer.max_actor_ckpt_to_keep", "checkpoint.keep"),
    to("trainer.resume_mode", "checkpoint.resume", "auto", lost_resume),
    to(f"{C}cliprange_value", "algorithm.value_clip", 0.5),
    to(f"{C}optim.lr", "algorithm.critic_lr", 1e-5),
    *(to(f"{group}{name}", "reward.function", default)
      for group in REWARDS for name, default in (("path", None), ("name", "compute_score"))),
    *(to(f"{group}{name}", ours, default) for group in BUFFERS for name, ours, default in (
        ("enable", "algorithm.overlong_buffer", False), ("len", "algorithm.overlong_buffer", 0),
        ("penalty_factor", "algorithm.overlong_penalty", 1.0))),
)  # fmt: skip

CHANGES = (
    *changes(NO_DISTILLATION, "distillation.*", when=distills),
    *changes("isoloss has no adapters (LoRA): it trains all weights", "actor_rollout_ref.model.lora_rank",
             "actor_rollout_ref.model.lora_alpha", "actor_rollout_ref.model.target_modules",
             "actor_rollout_ref.model.exclude_modules", "actor_rollout_ref.model.lora_adapter_path",
             "actor_rollout_ref.model.lora.*", when=lora),
    *changes("isoloss has no multi-token prediction: its loss is not added", "actor_rollout_ref.model.mtp.*", when=mtp),
    *changes("isoloss trains on text alone: no image, video or sound is learned from", "data.image_key",
             "data.video_key", "data.audio_key", "data.image_patch_size", "data.mm_processor_kwargs",
             f"{A}freeze_vision_tower", neutral=({}, 14)),
    *changes("isoloss replays no choices of routers: an expert is chosen anew in training", f"{A}router_replay.*",
             f"{MEGATRON}router_replay.*", f"{R}enable_rollout_routing_replay", neutral=("disabled",)),
    *changes("isoloss truncates importance weights by a cap (algorithm.importance_cap): nothing is rejected, and "
             "nothing normalized over the batch", f"{CORRECTION}rollout_rs",
             f"{CORRECTION}rollout_is_batch_normalize", f"{CORRECTION}rollout_token_veto_threshold"),
    *changes("isoloss truncates importance weights by a cap: nothing is rejected", f"{CORRECTION}rollout_rs_*",
             when=rejects),
    *changes("isoloss's loss with old_logprobs=rollout is the clipped one", f"{CORRECTION}loss_type",
             neutral=("ppo_clip",), when=bypass),
    *changes("isoloss trains in bf16, without quantization", f"{A}qat.enable", f"{MEGATRON}qat.enable",
             f"{A}fsdp_config.dtype", f"{MEGATRON}dtype", f"{OVERRIDE}fp8", f"{OVERRIDE}fp8_*",
             neutral=("bfloat16", "bf16")),
    *changes("the rollouts of isoloss have the policy's own weights, not quantized ones", f"{R}quantization",
             f"{R}quantization_config_file"),
    *changes("isoloss's loop has one turn per completion and no tools: write a rollout backend (docs/rollout.md)",
             f"{R}multi_turn.*", f"{R}agent.default_agent_loop", f"{R}agent.agent_loop_config_path",
             f"{R}agent.agent_loop_manager_class", "data.tool_config_path", "data.function_tool_path",
             neutral=("single_turn_agent",), when=agent),
    *changes("isoloss reads all rows of the files by its own loader", "data.train_max_samples", "data.custom_cls.path",
             "data.sampler.class_path", "data.datagen.path", neutral=(-1,)),
    *changes(BALANCING, f"{OVERRIDE}moe_aux_loss_coeff", f"{OVERRIDE}moe_z_loss_coeff",
             f"{OVERRIDE}moe_router_bias_update_rate", neutral=(0,)),
    *changes("isoloss has AdamW alone", f"{OPTIM}optimizer", neutral=("AdamW", "adam", "FusedAdam")),
    *changes("warm-up rises from 0, over the whole run, and weight decay is constant", f"{OPTIM}lr_warmup_init",
             f"{OPTIM}lr_decay_steps", f"{OPTIM}num_cycles", f"{OPTIM}weight_decay_incr_style",
             f"{OPTIM}lr_wsd_decay_steps", neutral=(0, 0.5, -1, "constant")),
    *changes("isoloss samples without such weights", "algorithm.use_pf_ppo"),
    *changes("the coefficient of the divergence is constant", "algorithm.kl_ctrl.type", neutral=("fixed",)),
    *changes("the critic and the policy are trained from the first step on", "trainer.critic_warmup", neutral=(0,)),
    *changes("isoloss has no reward models: reward.function calls your code, which may ask one",
             "reward_model.enable", "reward.reward_model.enable"),
    *changes("rollout.max_staleness says how old the weights of a rollout may be, and its default is 0: on policy",
             "async_training.staleness_threshold", "async_training.partial_rollout",
             "async_training.trigger_parameter_sync_step", neutral=(0, 1)),
)  # fmt: skip
WITHOUT = (
    *none("rows are always packed without padding", "actor_rollout_ref.model.use_remove_padding",
          f"{A}use_remove_padding", f"{A}pad_to_length", f"{MEGATRON}use_remove_padding"),
    *none("memory.recompute_modules has names of its own, and changes no number",
          "actor_rollout_ref.model.enable_activation_offload", f"{OVERRIDE}recompute_modules"),
    *none("config.json of model.path says what the model is, and isoloss builds it", "actor_rollout_ref.model.*",
          f"{MEGATRON}override_transformer_config.*", f"{MEGATRON}override_mcore_model_config.*",
          "actor_rollout_ref.nccl_timeout",
          "actor_rollout_ref.hybrid_engine", f"{MEGATRON}use_mbridge", f"{MEGATRON}vanilla_mbridge"),
    *none(MEMORY, f"{A}fsdp_config.*", f"{A}strategy", f"{MEGATRON}param_offload", f"{MEGATRON}grad_offload",
          f"{MEGATRON}optimizer_offload", f"{MEGATRON}use_megatron_fsdp", f"{OPTIM}override_optimizer_config.*",
          f"{OPTIM}override_optimizer_config", f"{MEGATRON}override_ddp_config.*",
          f"{MEGATRON}use_distributed_optimizer"),
    *none("isoloss's own Megatron-Core layers, losses and checkpoints need no such switch", f"{MEGATRON}*",
          f"{A}use_torch_compile", f"{A}entropy_from_logits_with_chunking", f"{A}entropy_from_logits_chunk_size",
          f"{A}entropy_checkpointing", f"{A}calculate_entropy", f"{A}calculate_sum_pi_squared", f"{A}use_fused_kernels",
          f"{A}use_prefix_grouper", f"{A}sum_pi_squared_checkpointing", f"{A}rollout_n", f"{A}_target_"),
    *none("isoloss trains with Megatron-Core alone: give the parallel.* keys", f"{A}veomni.*", f"{A}torchtitan.*",
          f"{A}engine.*", f"{A}model_engine", neutral=("megatron",)),
    *none("AdamW", f"{OPTIM}optimizer_impl", neutral=("torch.optim",)),
    *none("the schedule is of the whole run", f"{OPTIM}zero_indexed_step", f"{OPTIM}total_training_steps",
          f"{OPTIM}lr_wsd_decay_style", neutral=(None, True, -1, "exponential")),
    *none("isoloss has AdamW in fp32 alone", f"{OPTIM}*"),
    *none("isoloss has no such loss, so nothing reads it", f"{A}policy_loss.*", f"{A}tau_pos", f"{A}tau_neg",
          f"{A}dro_beta"),
    *none("mini-batches are dealt out anew by train.seed", f"{A}shuffle", f"{A}data_loader_seed"),
    *none("checkpoints hold model, optimizer and the place in the data, on any layout", f"{A}checkpoint.*",
          "trainer.default_local_dir", "trainer.default_hdfs_dir", "trainer.del_local_ckpt_after_load",
          "trainer.max_critic_ckpt_to_keep", "trainer.resume_from_path", "trainer.esi_redundant_time"),
    *none("a setting of quantized training, which isoloss lacks", f"{A}qat.*"),
    *none("no profiler of its own", f"{A}profiler.*", f"{R}profiler.*", "actor_rollout_ref.ref.profiler.*",
          "global_profiler.*", f"{C}profiler.*", "reward_model.profiler.*"),
    *none(BY_PLAN, f"{R}log_prob_*"),
    *none(ONE_REFERENCE, "actor_rollout_ref.ref.*"),
    *none("evaluations have one completion per prompt", f"{VAL}n", neutral=(1,)),
    *none("evaluations sample from the whole vocabulary, or rollout.eval_top_p", f"{VAL}top_k", neutral=(-1, 0)),
    *none("one process generates, or SGLang servers", f"{R}agent.*", neutral=(False, None)),
    *none(SERVERS, f"{R}*"),
    *none("rows must have the columns of docs/rewards.md: write your column as `prompt`", "data.prompt_key",
          neutral=("prompt",), matter="give"),
    *none("Parquet and JSON Lines with the columns of docs/rewards.md, verl's among them",
          "data.reward_fn_key", "data.return_raw_chat", "data.return_full_prompt", "data.return_raw_input_ids",
          neutral=("data_source", True, False)),
    *none("all rows of the files, in an order by train.seed", "data.val_max_samples",
          "data.shuffle", "data.validation_shuffle", "data.sampler.*", neutral=(-1, True, False, None)),
    *none("text only, read by isoloss's own loader", "data.*"),
    *none("a round of dynamic sampling draws exactly the prompts that are missing", "data.gen_batch_size",
          "algorithm.filter_groups.*"),
    *none("nothing reads it without what it is a setting of, which isoloss lacks", "algorithm.pf_ppo.*",
          "algorithm.kl_ctrl.*"),
    *none("isoloss truncates importance weights: algorithm.importance", f"{CORRECTION}*"),
    *none("the critic is the policy's model on its layout; the rest of its optimizer follows optim", f"{C}*"),
    *none("no reward models: reward.function calls your code, which may ask one", "reward_model.*", "reward.*",
          "reward_manager.*", "sandbox_fusion.*", "custom_reward_function.*", neutral=(False, None, "naive", "dapo")),
    *none(LOGS, "trainer.logger", "trainer.project_name", "trainer.experiment_name", "trainer.log_val_generations",
          "trainer.rollout_data_dir", "trainer.validation_data_dir"),
    *none("torchrun decides how many processes run", "trainer.n_gpus_per_node", "trainer.nnodes", "trainer.device",
          "ray_kwargs.*", "trainer.ray_wait_register_center_timeout", "ray_init.*"),
    *none("there is always an evaluation before the first step", "trainer.val_before_train", neutral=(True,)),
    *none("the plan always balances cost over ranks", "trainer.balance_batch"),
    *none("verl's older workers, whose loss is told below", "trainer.use_legacy_worker_impl"),
    *none("isoloss has no such mode", "trainer.val_only", "transfer_queue.*", "skip.*", f"{A}load_weight",
          "trainer.v1.*",
          "async_training.*", "rollout.*", "trainer.use_v1", neutral=(False, True, None)),
    *none("verl's choice of files with defaults, which isoloss knows", "model_engine", "defaults", "hydra.*",
          "_target_",
          "algorithm._target_"),
)  # fmt: skip
ROWS: tuple[Row, ...] = TRANSLATED + CHANGES + WITHOUT
