"""`sppo profile`: measures the devices present, for the planner."""

from collections.abc import Sequence
from pathlib import Path

from sppo_jax.check.small import own_settings
from sppo_jax.commands.command import DONE, Parser, num_simulated_devices, some_path
from sppo_jax.commands.outputs import FIGURES, Output, check_outputs
from sppo_jax.commands.shipped import find_config
from sppo_jax.config import config_from_dict, load_config
from sppo_jax.hardware.measured_figures import Profile, write_profile
from sppo_jax.processes import distributed
from sppo_jax.processes.environment import simulate_devices, skip_cuda_without_driver, warn_of_unknown_flags


def run(words: Sequence[str]) -> int:
    """Measures, stores the figures as JSON and prints them; returns the exit code."""
    parser = Parser(
        prog="sppo profile", description="Measure the devices present, and write the file that hardware.measured reads."
    )
    parser.add_argument(
        "--out", type=some_path, default=Path("profile.json"), help="the JSON file; profile.json by default"
    )
    parser.add_argument("--devices", default="auto", help="auto, or cpu:N for N devices simulated on the CPU")
    parser.add_argument("--config", type=some_path, help="a config whose model gives the shape of the layers")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller sizes, shorter runs")
    args = parser.parse_args(words)
    num_simulated = num_simulated_devices(args.devices)
    check_outputs(Output(option="--out", path=args.out, head=FIGURES), inputs=[args.config])
    model = load_config(find_config(str(args.config))).model if args.config else None
    if num_simulated:
        simulate_devices(distributed.local_devices(num_simulated))

    skip_cuda_without_driver()
    # Processes must agree on a config: any, of the shape of the devices.
    distributed.start(config_from_dict(own_settings("cpu", num_simulated or 1, 16)))
    warn_of_unknown_flags()
    import jax

    from sppo_jax.profile.measure import default_model, default_sizes, measure

    platform = jax.default_backend()
    sizes = default_sizes(platform, quick=args.quick)
    profile = measure(model or default_model(platform), sizes, distributed.say)
    if distributed.is_main():
        write_profile(profile, args.out)
    distributed.say(
        f"\n{_table(profile)}\n\nwrote {args.out}; hardware.measured={args.out} makes the planner use these figures"
    )
    return DONE


def _table(profile: Profile) -> str:
    def rate(bytes_s: float | None, why: str) -> str:
        return f"{bytes_s / 1e9:.4g} GB/s" if bytes_s else f"not measured ({why})"

    rows = [
        ("best matmul", f"{profile.matmul_flops_s / 1e12:.4g} TFLOP/s"),
        ("layer around attention", f"{profile.layer_flops_s / 1e12:.4g} TFLOP/s"),
        ("attention, longest prefix", f"{profile.attention_flops_s / 1e12:.4g} TFLOP/s"),
        ("device memory", rate(profile.hbm_bytes_s, "")),
        ("link to the next device", rate(profile.link_bytes_s, "one device")),
        ("host copies, slower way", rate(profile.host_link_bytes_s, "a CPU's memory is the host's")),
        ("a tick", f"{profile.overhead_s * 1e6:.0f} us at any length"),
        ("a layer", f"the time of {profile.overhead_tokens:.0f} tokens at any length"),
    ]
    return "\n".join(f"{name:27} {value}" for name, value in rows)
