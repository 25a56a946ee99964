//! A failing driver: whichever function fails, and when, the caller gets an error, and nothing
//! panics, hangs, or leaks.
//!
//! The driver is a library of the test's own (`driver.cpp`), which has a device and runs nothing.
//! Each fault runs in its own process, because drivers are loaded once.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test that finds nothing fails, and says what it skips"
)]

use std::error::Error;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use std::{env, thread};

use half::f16;
use kv_core::backend::{
    Backend, ChunkShape, HostPool, KvStorage, PendingChunk, PlaneLayout, PlaneShape, Queue,
    Readback,
};
use kv_core::{
    AttentionOptions, Axes, BlockId, BlockOrder, CacheSpec, DType, KvCache, KvFormat, SequenceId,
    StartOptions, Step, StepInput, TensorView, TensorViewMut,
};
use kv_cuda::{CudaBackend, CudaBuffer, CudaOptions, StepLimits};

/// Marks a process that runs the work with the test's driver.
const CHILD: &str = "KV_TEST_CHILD";
/// Names the fault for the driver.
const FAULT: &str = "KV_TEST_FAULT";
/// Switches dependent launches off.
const DEPENDENT: &str = "KV_CUDA_DEPENDENT_LAUNCHES";
/// Functions that the test's driver has.
const FUNCTIONS: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceTotalMem_v2",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuMemAlloc_v2",
    "cuMemHostAlloc",
    "cuMemsetD8Async",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyBatchAsync_v2",
    "cuStreamCreate",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphUpload",
    "cuEventCreate",
    "cuEventRecord",
    "cuModuleLoadDataEx",
    "cuModuleGetFunction",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuLaunchKernel",
];
/// Functions that clean up, or whose failure has a fallback: their failure need not be an error of
/// a call.
const QUIET: &[&str] = &[
    "cuThreadExchangeStreamCaptureMode",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxSynchronize",
    "cuMemFree_v2",
    "cuMemFreeHost",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuModuleUnload",
];
/// Codes of the driver: an invalid value, and a kernel that broke its context.
const INVALID_VALUE: u32 = 1;
const LAUNCH_FAILED: u32 = 719;

const KV_HEADS: u32 = 2;
const DIM: u32 = 64;
const BATCH: u32 = 2;

/// Uses blocks and a cache, from opening the device to a replayed step: every kind of call. Returns
/// the reason for which kernels were launched one after another, if they were.
fn work() -> Result<Option<String>, Box<dyn Error>> {
    let backend = CudaBackend::open(&CudaOptions::default().without_cache())?;
    // Each block is a copy in either plane: 4,096 copies, some more, and three times as many.
    for num_blocks in [2048, 2049, 3 * 2048 + 1] {
        move_blocks(&backend, num_blocks)?;
    }
    let row = u64::from(BATCH * KV_HEADS * DIM) * 2;
    let [q, k, v, out] = [(); 4].map(|()| backend.alloc(row));
    let buffers = [q?, k?, v?, out?];
    let spec = CacheSpec::builder()
        .layers(1)
        .kv_heads(KV_HEADS)
        .head_dim(DIM)
        .format(KvFormat::Bf16)
        .max_seq_len(200)
        .max_sequences(BATCH)
        .paged(16, 40)
        .build()?;
    let mut cache = KvCache::new(backend.clone(), spec)?;
    cache.queue_mut().set_step_limits(StepLimits {
        sequences: BATCH,
        tokens_per_sequence: 1,
        cached_sequences: BATCH,
        max_seq_len: 200,
        splits: 64,
    });
    let rows = vec![f16::ONE; (BATCH * KV_HEADS * DIM).try_into()?];
    for buffer in &buffers {
        cache.queue_mut().upload(buffer, 0, bytemuck::cast_slice(&rows))?;
    }
    let ids: Vec<_> = (0..u64::from(BATCH)).map(SequenceId).collect();
    for id in &ids {
        cache.start(*id, &[], StartOptions::default())?;
    }
    let inputs: Vec<_> = ids.iter().map(|id| StepInput::count(*id, 1)).collect();
    for captures in [false, true] {
        let mut step = cache.begin_step(&inputs)?;
        if captures {
            step.queue_mut().begin_capture()?;
            layer(&mut step, &buffers)?;
            let graph = step.queue_mut().end_capture()?;
            step.queue_mut().replay(&graph)?;
            step.mark_written();
        } else {
            layer(&mut step, &buffers)?;
        }
        step.commit()?;
    }
    for id in ids {
        cache.release(id)?;
    }
    let [.., out] = &buffers;
    let _ = cache.queue_mut().download(out, 0, out.len())?.wait()?;
    Ok(backend.serial_launches())
}

/// Copies all blocks of a storage to the host, overwrites them, and copies them back.
fn move_blocks(backend: &CudaBackend, num_blocks: u32) -> Result<(), Box<dyn Error>> {
    let (order, format) = (BlockOrder::Nhd, KvFormat::F16);
    let shape =
        PlaneShape { num_blocks, block_size: 1, num_kv_heads: 1, head_dim: 8, order, format };
    let mut storage = KvStorage::new(backend, [PlaneLayout::new(shape)?; 2])?;
    storage.allocate(backend, 0)?;
    let mut queue = backend.queue()?;
    let view = storage.view();
    let planes: Vec<_> = view.planes().filter_map(|plane| plane.segment(0)).collect();
    let bytes = |plane: u32| -> Vec<u8> {
        (0..num_blocks)
            .flat_map(|block| [block.wrapping_add(plane); 4])
            .flat_map(u32::to_le_bytes)
            .collect()
    };
    for (index, plane) in (0..).zip(&planes) {
        queue.upload(plane, 0, &bytes(index))?;
    }
    let blocks: Vec<_> = (0..num_blocks).map(BlockId).collect();
    let mut pool =
        backend.host_pool(view, ChunkShape { blocks: num_blocks, header_bytes: 1 }, 1)?;
    let chunk = pool.take().ok_or("a new pool has a chunk")?;
    let chunk = pool.copy_out(&queue.submit()?, view, &blocks, chunk, 0)?.wait()?;
    for plane in &planes {
        queue.zero(plane, 0, plane.len())?;
    }
    let copied = pool.copy_in(&queue.submit()?, view, &blocks, &chunk, 0)?;
    queue.wait_for(&copied)?;
    for (index, plane) in (0..).zip(&planes) {
        if queue.download(plane, 0, plane.len())?.wait()? != bytes(index) {
            return Err(format!("plane {index} of {num_blocks} blocks has changed").into());
        }
    }
    Ok(())
}

fn layer(
    step: &mut Step<'_, CudaBackend>,
    [q, k, v, out]: &[CudaBuffer; 4],
) -> Result<(), Box<dyn Error>> {
    let dims = [BATCH, KV_HEADS, DIM];
    let [q, k, v] = [q, k, v].map(|buffer| TensorView::device(DType::F16, buffer, 0, &dims));
    step.write(0, k, v, Axes::Thd)?;
    let out = TensorViewMut::device(DType::F16, out, 0, &dims);
    Ok(step.attend(0, q, out, &AttentionOptions::causal(0.125))?)
}

/// Runs the work in a process of its own and prints its outcome after everything is dropped.
#[test]
fn with_the_driver_of_the_test() {
    if env::var_os(CHILD).is_none() {
        return;
    }
    match work() {
        Ok(reason) => {
            println!("serial: {}", reason.as_deref().unwrap_or("no"));
            println!("outcome: all was done");
        }
        Err(error) => println!("outcome: {error}"),
    }
}

/// Compiles the driver in a folder of its own, `None` without a compiler.
fn driver(folder: &Path, flags: &[&str]) -> Option<PathBuf> {
    let library = folder.join("libcuda.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/failing_driver/driver.cpp");
    let mut compiler = Command::new(env::var_os("CXX").unwrap_or_else(|| "g++".into()));
    compiler.args(["-std=c++17", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o"]);
    let Ok(status) = compiler.arg(&library).args(flags).arg(source).status() else {
        println!("skipped: no C++ compiler");
        return None;
    };
    assert!(status.success(), "the driver of the test does not compile");
    Some(folder.to_owned())
}

/// Waits for a process, which must end by itself.
fn wait(child: &mut Child, what: &str) -> bool {
    let begin = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.success();
        }
        if begin.elapsed() > Duration::from_mins(2) {
            child.kill().unwrap();
            panic!("{what}: it hangs");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Returns the outcome of the work with a fault.
fn outcome(driver: &Path, fault: &str) -> String {
    said(driver, fault, &[]).1
}

/// Runs the work with a fault and more variables. Returns the reason for launches one after
/// another, and the outcome.
fn said(driver: &Path, fault: &str, variables: &[(&str, &str)]) -> (String, String) {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["with_the_driver_of_the_test", "--exact", "--nocapture"]);
    command.env(CHILD, "1").env(FAULT, fault).env("LD_LIBRARY_PATH", driver);
    command.env_remove(DEPENDENT).envs(variables.iter().copied());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let is_right = wait(&mut child, fault);
    let (mut said, mut complaint) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut complaint).unwrap();
    assert!(is_right && complaint.is_empty(), "{fault}: {said}\n{complaint}");
    let after = |word| said.lines().find_map(|line| Some(line.split_once(word)?.1.to_owned()));
    let outcome = after("outcome: ").unwrap_or_else(|| panic!("{fault}: no outcome in {said}"));
    (after("serial: ").unwrap_or_default(), outcome)
}

/// Kernels overlap where everything allows it. Otherwise the older call launches them, and the
/// reason is told.
#[test]
#[cfg(target_os = "linux")]
fn launches_overlap_or_the_reason_is_told() {
    let [old, new] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let Some(old) = driver(old.path(), &[]).map(|path| (path, old)) else { return };
    let Some(new) = driver(new.path(), &["-DKV_TEST_LAUNCH_EX"]).map(|path| (path, new)) else {
        return;
    };
    // How many launches are dependent: all, none, or those before the fault.
    let (all, none) = (usize::MAX, 0);
    let no_fault = "nothing 1 0";
    for (driver, fault, variable, dependent, reason) in [
        (&new, no_fault, None, all, "no"),
        (&new, no_fault, Some((DEPENDENT, "1")), all, "no"),
        (&new, no_fault, Some((DEPENDENT, "0")), none, "switched off"),
        (&new, no_fault, Some(("KV_TEST_PTX", "1")), none, "the code is PTX"),
        (&new, "cuLaunchKernelEx 1 1", None, none, "CUDA_ERROR_INVALID_VALUE"),
        (&new, "cuLaunchKernelEx 3 1", None, 2, "CUDA_ERROR_INVALID_VALUE"),
        (&old, no_fault, None, none, "no cuLaunchKernelEx"),
    ] {
        let log = driver.0.join("log");
        let log_of = [("KV_TEST_LOG", log.to_str().unwrap())];
        let variables: Vec<_> = log_of.into_iter().chain(variable).collect();
        let (serial, outcome) = said(&driver.0, fault, &variables);
        assert_eq!(outcome, "all was done", "{fault} {variable:?}");
        assert!(serial.contains(reason), "{fault} {variable:?}: {serial}");
        let lines = std::fs::read_to_string(&log).unwrap();
        std::fs::remove_file(&log).unwrap();
        let count = |word| lines.lines().filter(|line| line.starts_with(word)).count();
        let (found, launches) = (count("dependent "), count("dependent ") + count("launch "));
        assert!(launches > 4, "{lines}");
        assert_eq!(found, dependent.min(launches), "{fault} {variable:?}");
    }
    // A kernel that broke its context is no refusal.
    let outcome = outcome(&new.0, "cuLaunchKernelEx 1 719");
    assert!(outcome != "all was done", "{outcome}");
}

#[test]
#[cfg(target_os = "linux")]
fn every_function_may_fail_at_any_time() {
    let folder = tempfile::tempdir().unwrap();
    let Some(driver) = driver(folder.path(), &[]) else { return };
    assert_eq!(outcome(&driver, "nothing 1 0"), "all was done");
    let mut faults = Vec::new();
    for (names, is_quiet) in [(FUNCTIONS, false), (QUIET, true)] {
        for name in names {
            for (call, code) in [(1, INVALID_VALUE), (1, LAUNCH_FAILED), (3, LAUNCH_FAILED)] {
                // A function need not be called; most are called once at least.
                faults.push((format!("{name} {call} {code}"), is_quiet || call > 1));
            }
        }
    }
    let faults = Mutex::new(faults);
    let check = || {
        while let Some((fault, is_quiet)) = { faults.lock().unwrap().pop() } {
            let outcome = outcome(&driver, &fault);
            let is_done = outcome == "all was done";
            assert!(is_quiet || !is_done, "{fault}: no error");
        }
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..2).map(|_| scope.spawn(check)).collect();
        for worker in workers {
            worker.join().unwrap();
        }
    });
}
