//! A custom backend that forwards every call to another one and logs it (see `kv::backend`).
//!
//! `cargo run --release -p kv --example own_backend -- cpu`
#![expect(clippy::print_stdout, reason = "an example")]

use kv::backend::plan::{AttendArgs, AttentionPlan, ConvertArgs, ConvertPlan, CopyArgs, CopyPlan};
use kv::backend::plan::{GatherArgs, GatherPlan, WriteArgs, WritePlan};
use kv::backend::{Backend, Capabilities, ChunkShape, Queue, StorageView};
use kv::error::DeviceError;
use kv::{AttentionOptions, Axes, CacheSpec, Device, GroupId, KvCache};
use kv::{SequenceId, StartOptions, StepInput, TensorView, TensorViewMut};
use std::sync::{Mutex, PoisonError};

static CALLS: Mutex<Vec<&str>> = Mutex::new(Vec::new());

/// A backend, or one of its queues.
#[derive(Debug)]
struct Logged<T>(T);

impl<B: Backend> Backend for Logged<B> {
    type Buffer = B::Buffer;
    type Queue = Logged<B::Queue>;
    type HostPool = B::HostPool;
    fn name(&self) -> &'static str {
        "logged"
    }
    fn capabilities(&self) -> &Capabilities {
        self.0.capabilities()
    }
    fn alloc(&self, bytes: u64) -> Result<B::Buffer, DeviceError> {
        self.0.alloc(bytes)
    }
    fn queue(&self) -> Result<Self::Queue, DeviceError> {
        self.0.queue().map(Logged)
    }
    fn host_pool(
        &self,
        storage: StorageView<'_, B::Buffer>,
        shape: ChunkShape,
        chunks: u32,
    ) -> Result<B::HostPool, DeviceError> {
        self.0.host_pool(storage, shape, chunks)
    }
}

macro_rules! log_and_forward {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $out:ty;)*) => {$(
        fn $name(&mut self, $($arg: $type),*) -> Result<$out, DeviceError> {
            CALLS.lock().unwrap_or_else(PoisonError::into_inner).push(stringify!($name));
            self.0.$name($($arg),*)
        }
    )*};
}

impl<Q: Queue> Queue for Logged<Q> {
    type Buffer = Q::Buffer;
    type Fence = Q::Fence;
    type Readback = Q::Readback;
    log_and_forward! {
        fn upload(to: &Q::Buffer, offset: u64, bytes: &[u8]) -> ();
        fn download(from: &Q::Buffer, offset: u64, bytes: u64) -> Q::Readback;
        fn zero(buffer: &Q::Buffer, offset: u64, bytes: u64) -> ();
        fn prepare(group: GroupId, write: &WritePlan<'_>, attend: &AttentionPlan<'_>) -> ();
        fn write_kv(plan: &WritePlan<'_>, args: WriteArgs<'_, Q::Buffer>) -> ();
        fn attend(plan: &AttentionPlan<'_>, args: AttendArgs<'_, Q::Buffer>) -> ();
        fn copy_blocks(plan: &CopyPlan<'_>, args: CopyArgs<'_, Q::Buffer>) -> ();
        fn gather(plan: &GatherPlan<'_>, args: GatherArgs<'_, Q::Buffer>) -> ();
        fn convert(plan: &ConvertPlan, args: ConvertArgs<'_, Q::Buffer>) -> ();
        fn flush() -> (); fn submit() -> Q::Fence; fn wait_for(fence: &Q::Fence) -> ();
    }
}

fn main() -> Result<(), kv::Error> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "cpu".to_owned());
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(16, 8).build()?;
    let mut cache = KvCache::new(Logged(Device::open(&device)?), spec)?;
    cache.start(SequenceId(0), &[7], StartOptions::default())?;
    let mut step = cache.begin_step(&[StepInput::tokens(SequenceId(0), &[7])])?;
    let (values, mut out, dims) = ([1.0_f32, 2.0, 3.0, 4.0], [0.0_f32; 4], [1, 1, 4]);
    let row = TensorView::host(&values, &dims);
    step.write(0, row, row, Axes::Thd)?;
    step.attend(0, row, TensorViewMut::host(&mut out, &dims), &AttentionOptions::causal(0.5))?;
    step.commit()?;
    assert!(out.iter().zip(values).all(|(out, v)| (out - v).abs() < 1e-6), "{out:?}");
    let calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    assert!(calls.windows(2).any(|calls| calls == ["write_kv", "attend"]), "{calls:?}");
    println!("{device}: {calls:?}");
    Ok(())
}
