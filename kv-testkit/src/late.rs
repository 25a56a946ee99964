//! A device whose copies are done as late as its fences allow: a missing wait shows in the bytes.
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use kv_core::GroupId;
use kv_core::backend::{
    Backend, Capabilities, ChunkLayout, ChunkShape, Fence, Queue, QueueHostPool, Readback,
    Reserved, StorageView,
};
use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_core::plan::{
    AttendArgs, AttentionPlan, ConvertArgs, ConvertPlan, CopyArgs, CopyPlan, GatherArgs,
    GatherPlan, WriteArgs, WritePlan,
};

/// A wrapper of another device, for one cache and its host pools.
///
/// Uploads, downloads and zeroing are recorded and run late: when a later operation on their queue,
/// work of another queue that waits for them, or a host that waits for their fence or has polled it
/// several times needs them.
///
/// The other operations borrow their arguments and cannot be recorded: they run when they are
/// called, after all operations recorded before them. A copy of another queue that is not ordered
/// after such an operation would be right by chance, so recording the copy panics.
pub struct LateDevice<B: Backend> {
    inner: Arc<B>,
    work: Arc<Work<B::Queue>>,
    /// Polls that find nothing, at most.
    polls_max: u32,
}

impl<B: Backend> LateDevice<B> {
    /// Wraps a device on which a thread may wait. Fences and readbacks are pending for up to
    /// `polls_max` polls.
    pub fn new(inner: B, polls_max: u32) -> Self {
        let queues = Queues { queues: Vec::new(), host: Clock::default() };
        Self { inner: Arc::new(inner), work: Arc::new(Work(Mutex::new(queues))), polls_max }
    }
}

impl<B: Backend> Clone for LateDevice<B> {
    fn clone(&self) -> Self {
        let (inner, work) = (Arc::clone(&self.inner), Arc::clone(&self.work));
        Self { inner, work, polls_max: self.polls_max }
    }
}

impl<B: Backend> fmt::Debug for LateDevice<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LateDevice").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<B: Backend> Backend for LateDevice<B> {
    type Buffer = B::Buffer;
    type Queue = LateQueue<B::Queue>;
    type HostPool = QueueHostPool<Self::Queue>;

    fn name(&self) -> &'static str {
        self.inner.name()
    }
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }
    fn reserve_planes(&self, bytes: u64) -> Result<Reserved, DeviceError> {
        self.inner.reserve_planes(bytes)
    }
    fn alloc(&self, bytes: u64) -> Result<B::Buffer, DeviceError> {
        self.inner.alloc(bytes)
    }
    fn queue(&self) -> Result<Self::Queue, DeviceError> {
        let index = self.work.lock().open(self.inner.queue()?);
        Ok(LateQueue { index, work: Arc::clone(&self.work), polls_max: self.polls_max })
    }
    fn host_pool(
        &self,
        storage: StorageView<'_, B::Buffer>,
        shape: ChunkShape,
        chunks: u32,
    ) -> Result<Self::HostPool, DeviceError> {
        let layout = ChunkLayout::of(storage, shape)?;
        Ok(QueueHostPool::new(self.queue()?, layout, chunks))
    }
}

/// For each queue, the number of operations that are done before something.
#[derive(Debug, Clone, Default)]
struct Clock(Vec<u64>);

impl Clock {
    fn at(&self, queue: usize) -> u64 {
        self.0.get(queue).copied().unwrap_or(0)
    }

    fn raise(&mut self, queue: usize, to: u64) {
        if self.0.len() <= queue {
            self.0.resize(queue + 1, 0);
        }
        self.0[queue] = self.0[queue].max(to);
    }

    fn merge(&mut self, other: &Self) {
        other.0.iter().enumerate().for_each(|(queue, to)| self.raise(queue, *to));
    }
}

/// All queues of a device.
struct Work<Q>(Mutex<Queues<Q>>);

impl<Q> Work<Q> {
    fn lock(&self) -> MutexGuard<'_, Queues<Q>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Queues<Q> {
    queues: Vec<Operations<Q>>,
    /// Operations that the host has seen done.
    host: Clock,
}

/// The operations of one queue.
struct Operations<Q> {
    inner: Q,
    /// Operations that are not done.
    waiting: VecDeque<Operation<Q>>,
    /// Number of all operations, and of those that are done.
    recorded: u64,
    done: u64,
    /// Number of the operations up to the last one that was done when it was called.
    eager: u64,
    /// Operations of other queues that are done before the next operation.
    after: Clock,
}

/// An operation with its arguments.
type Run<Q> = Box<dyn FnOnce(&mut Q) -> Result<(), DeviceError> + Send>;

enum Operation<Q> {
    Run(Run<Q>),
    /// Waits for this number of operations of a queue.
    Wait(usize, u64),
}

impl<Q: Queue> Queues<Q> {
    fn open(&mut self, inner: Q) -> usize {
        let waiting = VecDeque::new();
        let after = Clock::default();
        self.queues.push(Operations { inner, waiting, recorded: 0, done: 0, eager: 0, after });
        self.queues.len() - 1
    }

    fn record(&mut self, queue: usize, operation: Operation<Q>) {
        let of = &mut self.queues[queue];
        of.waiting.push_back(operation);
        of.recorded += 1;
    }

    /// Records work that must be ordered after work that other queues have done at once.
    fn record_copy(
        &mut self,
        queue: usize,
        run: impl FnOnce(&mut Q) -> Result<(), DeviceError> + Send + 'static,
    ) {
        for (other, of) in self.queues.iter().enumerate().filter(|(other, _)| *other != queue) {
            let known = self.queues[queue].after.at(other).max(self.host.at(other));
            assert!(
                of.eager <= known,
                "work on queue {queue} is not ordered after operation {} of queue {other}",
                of.eager
            );
        }
        self.record(queue, Operation::Run(Box::new(run)));
    }

    /// Runs the first `number` operations of a queue, and the operations that they wait for.
    fn run(&mut self, queue: usize, number: u64) -> Result<(), DeviceError> {
        while self.queues[queue].done < number {
            let of = &mut self.queues[queue];
            let Some(operation) = of.waiting.pop_front() else { break };
            of.done += 1;
            match operation {
                Operation::Run(run) => run(&mut of.inner)?,
                Operation::Wait(other, number) => {
                    self.run(other, number)?;
                    let fence = self.queues[other].inner.submit()?;
                    self.queues[queue].inner.wait_for(&fence)?;
                }
            }
        }
        Ok(())
    }

    /// Does an operation at once, after everything before it.
    fn run_now<T>(
        &mut self,
        queue: usize,
        run: impl FnOnce(&mut Q) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        self.run(queue, self.queues[queue].recorded)?;
        let of = &mut self.queues[queue];
        of.recorded += 1;
        (of.done, of.eager) = (of.recorded, of.recorded);
        run(&mut of.inner)
    }

    /// Returns the operations that are done before the end of a queue's work.
    fn clock(&self, queue: usize) -> Clock {
        let mut clock = self.queues[queue].after.clone();
        clock.merge(&self.host);
        clock.raise(queue, self.queues[queue].recorded);
        clock
    }
}

/// A queue of a [`LateDevice`].
pub struct LateQueue<Q> {
    index: usize,
    work: Arc<Work<Q>>,
    polls_max: u32,
}

impl<Q> fmt::Debug for LateQueue<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LateQueue").field("index", &self.index).finish_non_exhaustive()
    }
}

impl<Q: Queue> LateQueue<Q> {
    fn run_now<T>(
        &self,
        run: impl FnOnce(&mut Q) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        self.work.lock().run_now(self.index, run)
    }

    /// Returns a fence of everything so far.
    fn fence(&self) -> LateFence<Q> {
        let clock = self.work.lock().clock(self.index);
        // Every number of polls occurs.
        let polls = clock.at(self.index) % (u64::from(self.polls_max) + 1);
        let polls_left = Arc::new(AtomicU32::new(polls as u32));
        LateFence { index: self.index, clock, work: Arc::clone(&self.work), polls_left }
    }
}

impl<Q> Queue for LateQueue<Q>
where
    Q: Queue<Buffer: Clone + Send>,
{
    type Buffer = Q::Buffer;
    type Fence = LateFence<Q>;
    type Readback = LateReadback<Q>;

    fn upload(&mut self, dst: &Q::Buffer, at: u64, src: &[u8]) -> Result<(), DeviceError> {
        let (dst, src) = (dst.clone(), src.to_vec());
        self.work.lock().record_copy(self.index, move |queue| queue.upload(&dst, at, &src));
        Ok(())
    }
    fn download(
        &mut self,
        src: &Q::Buffer,
        at: u64,
        bytes: u64,
    ) -> Result<Self::Readback, DeviceError> {
        let arrived = Arc::new(Mutex::new(None));
        let (src, to) = (src.clone(), Arc::clone(&arrived));
        self.work.lock().record_copy(self.index, move |queue| {
            let readback = queue.download(&src, at, bytes)?;
            queue.flush()?;
            *lock(&to) = Some(readback.wait()?);
            Ok(())
        });
        Ok(LateReadback { fence: self.fence(), arrived })
    }
    fn zero(&mut self, dst: &Q::Buffer, offset: u64, bytes: u64) -> Result<(), DeviceError> {
        let dst = dst.clone();
        self.work.lock().record_copy(self.index, move |queue| queue.zero(&dst, offset, bytes));
        Ok(())
    }
    fn prepare(
        &mut self,
        group: GroupId,
        write: &WritePlan<'_>,
        attend: &AttentionPlan<'_>,
    ) -> Result<(), DeviceError> {
        self.run_now(|queue| queue.prepare(group, write, attend))
    }
    fn write_kv(
        &mut self,
        plan: &WritePlan<'_>,
        args: WriteArgs<'_, Q::Buffer>,
    ) -> Result<(), DeviceError> {
        self.run_now(|queue| queue.write_kv(plan, args))
    }
    fn attend(
        &mut self,
        plan: &AttentionPlan<'_>,
        args: AttendArgs<'_, Q::Buffer>,
    ) -> Result<(), DeviceError> {
        self.run_now(|queue| queue.attend(plan, args))
    }
    fn copy_blocks(
        &mut self,
        plan: &CopyPlan<'_>,
        args: CopyArgs<'_, Q::Buffer>,
    ) -> Result<(), DeviceError> {
        self.run_now(|queue| queue.copy_blocks(plan, args))
    }
    fn gather(
        &mut self,
        plan: &GatherPlan<'_>,
        args: GatherArgs<'_, Q::Buffer>,
    ) -> Result<(), DeviceError> {
        self.run_now(|queue| queue.gather(plan, args))
    }
    fn convert(
        &mut self,
        plan: &ConvertPlan,
        args: ConvertArgs<'_, Q::Buffer>,
    ) -> Result<(), DeviceError> {
        self.run_now(|queue| queue.convert(plan, args))
    }
    fn flush(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
    fn submit(&mut self) -> Result<LateFence<Q>, DeviceError> {
        Ok(self.fence())
    }
    fn wait_for(&mut self, fence: &LateFence<Q>) -> Result<(), DeviceError> {
        let mut work = self.work.lock();
        work.queues[self.index].after.merge(&fence.clock);
        let number = fence.clock.at(fence.index);
        work.record(self.index, Operation::Wait(fence.index, number));
        Ok(())
    }
}

/// A fence of a [`LateQueue`].
pub struct LateFence<Q> {
    index: usize,
    clock: Clock,
    work: Arc<Work<Q>>,
    /// Polls that find nothing.
    polls_left: Arc<AtomicU32>,
}

impl<Q> Clone for LateFence<Q> {
    fn clone(&self) -> Self {
        let (work, polls_left) = (Arc::clone(&self.work), Arc::clone(&self.polls_left));
        Self { index: self.index, clock: self.clock.clone(), work, polls_left }
    }
}

impl<Q> fmt::Debug for LateFence<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (index, clock) = (&self.index, &self.clock);
        f.debug_struct("LateFence")
            .field("index", index)
            .field("clock", clock)
            .finish_non_exhaustive()
    }
}

impl<Q: Queue> Fence for LateFence<Q> {
    fn poll(&self, _: &mut Context<'_>) -> Poll<Result<(), DeviceError>> {
        match self.polls_left.load(Ordering::Relaxed) {
            0 => Poll::Ready(self.wait()),
            left => {
                self.polls_left.store(left - 1, Ordering::Relaxed);
                Poll::Pending
            }
        }
    }
    fn wait(&self) -> Result<(), DeviceError> {
        let mut work = self.work.lock();
        work.run(self.index, self.clock.at(self.index))?;
        work.host.merge(&self.clock);
        work.queues[self.index].inner.submit()?.wait()
    }
}

/// Bytes that a [`LateQueue`] reads.
#[derive(Debug)]
pub struct LateReadback<Q> {
    fence: LateFence<Q>,
    arrived: Arc<Mutex<Option<Vec<u8>>>>,
}

impl<Q: Queue> LateReadback<Q> {
    fn take(&self) -> Result<Vec<u8>, DeviceError> {
        let failed = || DeviceError::new(DeviceErrorKind::Driver, "read back");
        lock(&self.arrived).take().ok_or_else(failed)
    }
}

impl<Q: Queue> Readback for LateReadback<Q> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Vec<u8>, DeviceError>> {
        self.fence.poll(cx).map(|done| done.and_then(|()| self.take()))
    }
    fn wait(self) -> Result<Vec<u8>, DeviceError> {
        self.fence.wait()?;
        self.take()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use kv_core::backend::NullBackend;

    use super::*;

    #[test]
    fn copies_are_done_when_something_waits_for_them() {
        let backend = NullBackend::new();
        let control = backend.control();
        let device = LateDevice::new(backend, 0);
        let buffer = device.alloc(8).unwrap();
        let [mut queue, mut copies] = [(); 2].map(|()| device.queue().unwrap());
        let before = control.recorded();
        copies.upload(&buffer, 0, &[1; 8]).unwrap();
        let uploaded = copies.submit().unwrap();
        queue.wait_for(&uploaded).unwrap();
        queue.zero(&buffer, 0, 8).unwrap();
        let zeroed = queue.submit().unwrap();
        assert_eq!(control.recorded(), before);
        zeroed.wait().unwrap();
        // The upload, its fence and the wait for it, the zeroing and its fence.
        assert_eq!(control.recorded(), before + 5);
        uploaded.wait().unwrap();
        assert_eq!(control.recorded(), before + 6, "nothing is done twice");
    }

    #[test]
    fn a_readback_is_pending_for_some_polls() {
        let device = LateDevice::new(NullBackend::new(), 2);
        let (buffer, mut queue) = (device.alloc(8).unwrap(), device.queue().unwrap());
        let mut cx = Context::from_waker(Waker::noop());
        for (round, expected) in [1, 2, 0, 1].into_iter().enumerate() {
            let mut readback = queue.download(&buffer, 0, 8).unwrap();
            let pending = (0..9).take_while(|_| readback.poll(&mut cx).is_pending()).count();
            assert_eq!(pending, expected, "readback {round}");
        }
        let readback = queue.download(&buffer, 0, 8).unwrap();
        assert_eq!(readback.wait().unwrap(), [0; 8]);
    }
}
