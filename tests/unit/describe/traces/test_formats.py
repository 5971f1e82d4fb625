import gzip
import lzma
import math
from pathlib import Path

import pytest

from drystone.describe.files.cluster import load_cluster
from drystone.describe.traces.reading import Reading
from drystone.describe.traces.requests import match_requests
from drystone.describe.traces.speeds import fill_batches, load_speeds
from drystone.describe.traces.trace import read_trace, render_trace
from drystone.errors import RequestError, UnreadableFile

SHARED = (
    "source,trace,job_id,submit_time_s,model,batch_size,num_gpus,gpu_type,duration_s,total_work,"
    "work_unit,deadline_s\n"
)
SACCT = (
    "JobID|User|Submit|Start|End|ElapsedRaw|State|AllocTRES|ReqTRES\n"
    "7|ann|2026-10-01T00:00:10|2026-10-01T00:01:00|2026-10-01T00:03:00|120|COMPLETED|"
    "billing=8,cpu=8,gres/gpu=4,gres/gpu:a100=4,node=1|cpu=8\n"
    "7.batch||2026-10-01T00:00:10|2026-10-01T00:01:00|2026-10-01T00:03:00|120|COMPLETED|"
    "cpu=8,gres/gpu=4|\n"
    "8|bob|2026-10-01T00:00:00|Unknown|Unknown|0|CANCELLED by 5||gres/gpu=2\n"
    "9|bob|2026-10-01T00:00:20|2026-10-01T00:00:30|2026-10-01T00:01:30|60|FAILED|cpu=1|cpu=1\n"
    "10_3|bob|2026-10-01T00:01:10|2026-10-01T00:01:30|Unknown|90|RUNNING|gres/gpu=2|\n"
)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_sacct_gives_jobs_with_gpus_and_says_what_it_leaves_out(tmp_path: Path):
    trace = read_trace(write(tmp_path / "sacct.txt", SACCT))

    assert trace.format == "sacct"
    first, second = trace.jobs
    assert (first.id, first.owner, first.requested_gpu, first.requested_count) == (
        "7", "ann", "a100", 4,
    )  # fmt: skip
    assert (first.total_samples, first.submit_seconds) == (480.0, 0.0)
    assert (second.id, second.submit_seconds, second.total_samples) == ("10_3", 60.0, 180.0)
    assert set(trace.notes) == {
        "1 steps of jobs are left out",
        "1 jobs that never ran are left out",
        "1 jobs without GPUs are left out",
        "1 jobs still ran: their length is what they had run by then",
    }


@pytest.mark.parametrize(
    ("elapsed", "seconds"), [("00:02:00", 120), ("1-01:00:00", 90000), ("02:03", 123)]
)
def test_sacct_may_tell_the_time_in_words(tmp_path: Path, elapsed: str, seconds: float):
    text = f"JobID|Submit|Elapsed|ReqGRES\n1|1700000000|{elapsed}|gpu:v100:2\n"

    job = read_trace(write(tmp_path / "s", text)).jobs[0]

    assert (job.total_samples, job.requested_gpu) == (2 * seconds, "v100")


@pytest.mark.parametrize(
    ("row", "by_duration", "samples", "batch"),
    [
        ("arena,t,a,5,bert_1.3B,256,4,a10,,120,iterations,", False, 120 * 256, 256),
        ("pollux,t,a,5,cifar10,2048,6,,,100,max_epochs,", False, 5_000_000, 2048),
        ("gavel,t,a,5,LM,16,4,,,1000,steps,", False, 16_000, 64),
        ("elasticflow,t,a,5,ncf,32768,8,,66,1548,iterations,70", False, 1548 * 32768, 32768),
        ("elasticflow,t,a,5,ncf,32768,8,,66,1548,iterations,70", True, 8 * 66, 1),
        ("rubick,t,a,5,vit,,2,A800-80GB,100.5,37239,steps;plan=ga;sla=0,", True, 201, 1),
        ("tiresias,t,a,5,vgg19,,1,,164,606,iterations,", True, 164, 1),
    ],
)
def test_every_artifact_counts_work_in_its_own_way(
    tmp_path: Path, row: str, by_duration: bool, samples: float, batch: int
):
    path = write(tmp_path / "t.csv", SHARED + row + "\n")

    job = read_trace(path, Reading(by_duration=by_duration)).jobs[0]

    assert (job.total_samples, job.global_batch) == (samples, batch)


def test_one_of_several_traces_in_a_file_is_named(tmp_path: Path):
    rows = "gavel,x,1,5,LM,16,4,,,10,steps,\ngavel,y,1,7,LM,16,4,,,30,steps,\n"
    path = write(tmp_path / "t.csv", SHARED + rows)

    assert read_trace(path, part="y").jobs[0].total_samples == 480
    with pytest.raises(RequestError, match=r"2 traces.*x, y"):
        read_trace(path)
    with pytest.raises(RequestError, match="unknown part"):
        read_trace(path, part="z")


def test_alibabas_pods_become_jobs(tmp_path: Path):
    text = (
        "pod,creation_time_s,scheduled_time_s,deletion_time_s,run_s,num_gpu,gpu_milli_per_gpu,"
        "gpu_spec_allowed,qos\n"
        "a,10,20,120,100,2,1000,V100|T4,LS\nb,10,,30,,1,500,,BE\nc,11,12,30,18,1,500,,BE\n"
        "d,5,6,7,1,0,0,,BE\n"
    )

    trace = read_trace(write(tmp_path / "t.csv", text))

    assert [(job.id, job.total_samples) for job in trace.jobs] == [("a", 200.0), ("c", 18.0)]
    assert trace.jobs[0].allowed_gpus == {"V100", "T4"}
    assert "1 pods asked for a part of a GPU: each is given a whole one" in trace.notes


def test_alibabas_node_list_is_a_cluster(tmp_path: Path):
    text = "sn,cpu_milli,memory_mib,gpu,model\nn0,1,1,2,P100\nn1,1,1,0,\nn2,1,1,8,T4\n"

    nodes = load_cluster(write(tmp_path / "c.csv", text))

    assert [(one.id, one.gpu, one.num_gpus) for one in nodes] == [
        ("n0", "P100", 2),
        ("n2", "T4", 8),
    ]


def test_all_bad_lines_are_named_and_nothing_is_taken(tmp_path: Path):
    text = "job_id,submit_time_s,num_gpus,duration_s\na,0,1,5\nb,x,1,5\nc,1,1.5,5\nd,2,1,0\n"

    with pytest.raises(RequestError) as refusal:
        read_trace(write(tmp_path / "t.csv", text))

    for line in ("line 3", "line 4", "line 5"):
        assert line in str(refusal.value)
    assert "line 2" not in str(refusal.value)


def test_an_unknown_header_names_the_known_formats(tmp_path: Path):
    with pytest.raises(RequestError) as refusal:
        read_trace(write(tmp_path / "t.csv", "when,what\n1,2\n"))

    for name in ("drystone", "sacct", "Pollux", "Philly", "Alibaba"):
        assert name in str(refusal.value)


def test_a_short_line_is_refused_with_its_number(tmp_path: Path):
    text = "id,submit_seconds,model,total_samples\na,0,m,1\nb,0\n"

    with pytest.raises(RequestError, match="line 3: 2 cells under 4 columns"):
        read_trace(write(tmp_path / "t.csv", text))


def test_what_is_written_reads_back(tmp_path: Path):
    text = (
        "id,submit_seconds,model,total_samples,seq_len,tuning,owner,allowed_gpus,deadline_seconds\n"
        "a,0,m,10,2048,lora,ann,A100+T4,99.5\nb,1.5,,20,,,,,\n"
    )
    jobs = read_trace(write(tmp_path / "t.csv", text)).jobs

    again = read_trace(write(tmp_path / "u.csv", render_trace(jobs))).jobs

    assert again == jobs
    assert again[1].deadline_seconds == math.inf


def test_requests_are_understood_as_types_of_the_cluster(tmp_path: Path):
    nodes = load_cluster(
        write(tmp_path / "c.yaml", "nodes: [{gpu: A100-80G, gpus_per_node: 8}, {gpu: T4}]")
    )
    rows = (
        "rubick,t,a,5,vit,,2,A800-80GB,1,7,steps,\nrubick,t,b,5,vit,,2,a100,1,7,steps,\n"
        "rubick,t,c,5,vit,,2,,1,7,steps,\n"
    )
    jobs = read_trace(write(tmp_path / "t.csv", SHARED + rows)).jobs

    matched, notes = match_requests(jobs, nodes)

    assert [job.requested_gpu for job in matched] == ["A100-80G", "A100-80G", "A100-80G"]
    assert "1 job asked for types that this cluster has not: any will do" in notes
    assert any("2 jobs asked for a number of GPUs only" in note for note in notes)


def test_speeds_of_many_sources_are_taken_from_the_traces_own(tmp_path: Path):
    text = (
        "source,model,gpu_type,num_nodes,num_gpus,global_batch,iter_time_s,kind\n"
        "sia,bert,T4,1,1,12,2.0,measured\npollux,bert,T4,1,1,12,3.0,measured\n"
        "pollux,bert,T4,1,2,24,3.0,measured\npollux,bert,T4,1,2,48,4.0,estimated\n"
    )
    path = write(tmp_path / "s.csv", text)

    steps = load_speeds(path, source="pollux")

    assert [(one.num_gpus, one.step_seconds) for one in steps] == [(1, 3.0), (2, 3.0)]
    with pytest.raises(RequestError, match="pollux, sia"):
        load_speeds(path)


def test_an_unmeasured_batch_takes_the_speed_of_the_nearest(tmp_path: Path):
    text = (
        "model,gpu_type,num_nodes,num_gpus,global_batch,iter_time_s\n"
        "m,T4,1,1,10,2.0\nm,T4,1,1,40,4.0\n"
    )
    steps = load_speeds(write(tmp_path / "s.csv", text))
    own = "id,submit_seconds,model,total_samples,global_batch\na,0,m,1,30\nb,0,n,1,30\n"
    jobs = read_trace(write(tmp_path / "t.csv", own)).jobs

    filled, num_kinds = fill_batches(steps, jobs)

    assert num_kinds == 1
    assert [(one.global_batch, one.step_seconds) for one in filled][2:] == [(30, 3.0)]


def test_a_packed_file_reads_as_the_file_in_it(tmp_path: Path):
    text = "job_id,submit_time_s,num_gpus,duration_s\na,0,2,100\nb,5,1,50\n"
    plain = tmp_path / "t.csv"
    plain.write_text(text)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "t.csv.xz").write_bytes(lzma.compress(text.encode()))

    assert read_trace(plain) == read_trace(tmp_path / "t.csv.gz")
    assert read_trace(plain) == read_trace(tmp_path / "t.csv.xz")


@pytest.mark.parametrize("name", ["t.csv.gz", "t.csv.xz"])
def test_a_packed_file_that_is_cut_off_is_refused(tmp_path: Path, name: str):
    pack = gzip.compress if name.endswith("gz") else lzma.compress
    path = tmp_path / name
    for content in (b"not packed", pack(b"job_id,submit_time_s\n" * 50)[:-9]):
        path.write_bytes(content)
        with pytest.raises(UnreadableFile, match="can be read"):
            read_trace(path)
