"""What nvidia-smi prints, as text, by several versions of the driver."""

from xml.etree.ElementTree import ParseError

import pytest

from sppo_jax.hardware.gpu_health import GpuHealth, parse_gpus, read_gpus

GPU = """
<gpu id="00000000:19:00.0"><product_name>NVIDIA H100 80GB HBM3</product_name><uuid>GPU-1</uuid>
<mig_mode><current_mig>Disabled</current_mig></mig_mode>
<ecc_errors><volatile><sram_correctable>3</sram_correctable><sram_uncorrectable_parity>1</sram_uncorrectable_parity>
<sram_uncorrectable_secded>0</sram_uncorrectable_secded><dram_uncorrectable>2</dram_uncorrectable></volatile>
<aggregate><dram_uncorrectable>9</dram_uncorrectable></aggregate></ecc_errors>
<remapped_rows><remapped_row_pending>Yes</remapped_row_pending><remapped_row_failure>No</remapped_row_failure>
</remapped_rows><temperature><gpu_temp>41 C</gpu_temp></temperature>
<fb_memory_usage><total>81559 MiB</total><used>1024 MiB</used><free>80000 MiB</free></fb_memory_usage>
<gpu_power_readings><average_power_draw>70.0 W</average_power_draw><instant_power_draw>71.5 W</instant_power_draw>
<current_power_limit>600.00 W</current_power_limit><default_power_limit>700.00 W</default_power_limit>
</gpu_power_readings><clocks><sm_clock>1200 MHz</sm_clock></clocks>
<max_clocks><sm_clock>1980 MHz</sm_clock></max_clocks>
<clocks_event_reasons><clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
<clocks_event_reason_hw_thermal_slowdown>Active</clocks_event_reason_hw_thermal_slowdown>
<clocks_event_reason_sw_power_cap>Not Active</clocks_event_reason_sw_power_cap></clocks_event_reasons>
<processes><process_info><pid>4711</pid><type>C</type></process_info><process_info><pid>12</pid><type>G</type>
</process_info></processes></gpu>"""


def log(*gpus):
    return f"<nvidia_smi_log><driver_version>580.126.20</driver_version>{''.join(gpus)}</nvidia_smi_log>"


def test_every_field_is_read():
    (gpu,) = parse_gpus(log(GPU))
    assert gpu == GpuHealth(
        name="NVIDIA H100 80GB HBM3",
        uuid="GPU-1",
        driver="580.126.20",
        is_divided=False,
        uncorrected=3,
        remap_pending=True,
        remap_failed=False,
        sm_mhz=1200.0,
        most_sm_mhz=1980.0,
        power_w=71.5,
        power_limit_w=600.0,
        default_power_limit_w=700.0,
        temperature_c=41.0,
        slowed_by=("hw thermal slowdown",),
        process_ids=(4711,),
        used_bytes=2**30,
        free_bytes=80000 * 2**20,
    )
    assert GpuHealth.from_dict(gpu.to_dict()) == gpu


def test_older_drivers_have_other_names():
    old = GPU.replace("clocks_event_reason", "clocks_throttle_reason").replace("gpu_power_readings", "power_readings")
    old = old.replace("current_power_limit", "power_limit").replace("instant_power_draw", "power_draw")
    assert parse_gpus(log(old)) == parse_gpus(log(GPU))


def test_what_is_not_told_is_not_known():
    silent = "<gpu><product_name>NVIDIA L4</product_name><ecc_errors><volatile><dram_uncorrectable>N/A"
    silent += "</dram_uncorrectable></volatile></ecc_errors><processes>N/A</processes>"
    silent += "<mig_mode><current_mig>Enabled</current_mig></mig_mode></gpu>"
    (gpu,) = parse_gpus(log(silent))
    assert (gpu.uncorrected, gpu.slowed_by, gpu.power_limit_w, gpu.process_ids, gpu.used_bytes) == (None,) * 5
    assert gpu.is_divided and parse_gpus(log()) == ()


def test_a_program_that_fails_says_nothing(tmp_path):
    with pytest.raises(ParseError):
        parse_gpus("NVIDIA-SMI has failed")
    assert read_gpus({"PATH": str(tmp_path)}) is None
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\n")
    program.chmod(0o755)
    assert read_gpus({"PATH": f"{tmp_path}:/bin"}) is None
    program.write_text(f"#!/bin/sh\ncat <<END\n{log(GPU)}\nEND\n")
    (gpu,) = read_gpus({"PATH": f"{tmp_path}:/bin"})
    assert gpu.uuid == "GPU-1"
