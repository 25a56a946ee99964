//! Recurrent states as tensors of candle.
use std::cell::RefCell;

use candle_core::backend::BackendStorage;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Storage, Tensor, bail};
use kv::backend::Backend;
use kv::error::PlanError;
use kv::{CacheError, Element, LayerId, Step, TensorView, TensorViewMut};

use crate::error::Error;
use crate::step::Held;

/// A part of a layer's state of all entries of a step: a place in the cache, and its extents.
#[derive(Debug, Clone)]
pub(crate) struct StatePart {
    layer: LayerId,
    part: usize,
    /// `[entries, ..]`, as the cache names them.
    dims: Vec<u32>,
    /// The same, as candle names them.
    shape: Vec<usize>,
}

impl StatePart {
    /// Finds a part in the cache of an open step.
    pub(crate) fn of<B: Backend>(step: &Step<'_, B>, layer: usize, part: usize) -> Result<Self> {
        let Ok(layer) = u16::try_from(layer).map(LayerId) else {
            bail!("a cache has no layer {layer}")
        };
        // Refuses a layer without a state.
        step.state_slots(layer).map_err(refused)?;
        let spec = step.cache().state().spec();
        let states = spec.locate_state(layer).and_then(|(group, _)| spec.states().get(group));
        let parts = states.map_or(&[][..], |states| states.parts());
        let Some(found) = parts.get(part) else {
            return Err(refused(PlanError::UnknownPart { layer, part, parts: parts.len() }));
        };
        let mut shape = vec![step.sequences().len()];
        for extent in found.shape().as_slice() {
            let Ok(extent) = usize::try_from(*extent) else { bail!("too many values") };
            shape.push(extent);
        }
        let dims = extents(&shape)?;
        Ok(Self { layer, part, dims, shape })
    }

    fn count(&self) -> Result<usize> {
        let count = self.shape.iter().try_fold(1_usize, |all, size| all.checked_mul(*size));
        count.ok_or_else(|| candle_core::Error::Msg("too many values".to_owned()))
    }

    /// Refuses a tensor with another number of axes.
    fn check(&self, given: &Tensor) -> Result<()> {
        if given.rank() == self.shape.len() {
            return Ok(());
        }
        let (tensor, got) = ("state", given.dims().to_vec());
        let expected = format!("[entries at least, ..] = {:?}", self.shape);
        let hint = "one entry for each sequence of the step, with the axes of the part";
        Err(Error::Shape { tensor, got, expected, hint }.into())
    }
}

/// Reads a part of a state to new memory, on the device of the tensor that the operation is applied
/// to; its values are not read.
pub(crate) struct ReadState<'a, 'c, B: Backend> {
    pub(crate) step: &'a RefCell<Held<'c, B>>,
    pub(crate) part: StatePart,
}

impl<B: Backend> CustomOp1 for ReadState<'_, '_, B> {
    fn name(&self) -> &'static str {
        "kv-state"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let StatePart { layer, part, dims, shape } = &self.part;
        let mut out = vec![0.0_f32; self.part.count()?];
        let view = TensorViewMut::host(&mut out, dims);
        let read = self.step.borrow_mut().with(|step| step.read_state(*layer, *part, view));
        read.map_err(candle_core::Error::wrap)?;
        Ok((CpuStorage::F32(out), shape.as_slice().into()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        at: &candle_core::CudaStorage,
        _: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let StatePart { layer, part, dims, shape } = &self.part;
        let lender =
            self.step.borrow_mut().with(|step| crate::cuda::Lender::of(step.cache().backend()))?;
        let mut out = at.device.alloc_zeros::<f32>(self.part.count()?)?;
        lender.write(&mut out, |out| {
            let view = TensorViewMut::device(f32::DTYPE, out, 0, dims);
            let read = self.step.borrow_mut().with(|step| step.read_state(*layer, *part, view));
            read.map_err(candle_core::Error::wrap)
        })?;
        let out = candle_core::CudaStorage::wrap_cuda_slice(out, at.device.clone());
        Ok((out, shape.as_slice().into()))
    }
}

/// Writes a part of a state: behind the first `tokens` new tokens of each entry, or behind all.
pub(crate) struct WriteState<'a, 'c, B: Backend> {
    pub(crate) step: &'a RefCell<Held<'c, B>>,
    pub(crate) part: StatePart,
    pub(crate) tokens: Option<u32>,
}

impl<B: Backend> WriteState<'_, '_, B> {
    /// Writes a dense tensor `[entries at least, ..]`.
    pub(crate) fn write(&self, state: &Tensor) -> Result<()> {
        self.part.check(state)?;
        let dims = extents(state.dims())?;
        let (storage, layout) = state.storage_and_layout();
        let Some((begin, end)) = layout.contiguous_offsets() else {
            bail!("the values of a state do not lie together");
        };
        let range = begin..end;
        match &*storage {
            Storage::Cpu(CpuStorage::F32(all)) => self.on_host(all.get(range), &dims),
            Storage::Cpu(CpuStorage::F16(all)) => self.on_host(all.get(range), &dims),
            Storage::Cpu(CpuStorage::BF16(all)) => self.on_host(all.get(range), &dims),
            Storage::Cpu(other) => Err(type_refused(other.dtype())),
            #[cfg(feature = "cuda")]
            Storage::Cuda(storage) => match &storage.slice {
                CudaStorageSlice::F32(all) => self.on_cuda(all, begin, &dims),
                CudaStorageSlice::F16(all) => self.on_cuda(all, begin, &dims),
                CudaStorageSlice::BF16(all) => self.on_cuda(all, begin, &dims),
                _ => Err(type_refused(storage.dtype())),
            },
            other => bail!("a state on {:?}: the cache has no backend for it", other.device()),
        }
    }

    fn on_host<T: Element>(&self, values: Option<&[T]>, dims: &[u32]) -> Result<()> {
        let Some(values) = values else { bail!("a tensor is longer than its storage") };
        self.run(TensorView::host(values, dims))
    }

    #[cfg(feature = "cuda")]
    fn on_cuda<T: crate::cuda::Value>(
        &self,
        values: &crate::cuda::Slice<T>,
        begin: usize,
        dims: &[u32],
    ) -> Result<()> {
        let lender =
            self.step.borrow_mut().with(|step| crate::cuda::Lender::of(step.cache().backend()))?;
        let offset = kv::num::to_u64(begin * size_of::<T>());
        lender.read(values, |values| self.run(TensorView::device(T::DTYPE, values, offset, dims)))
    }

    fn run(&self, state: TensorView<'_, B::Buffer>) -> Result<()> {
        let StatePart { layer, part, .. } = self.part;
        let written = self.step.borrow_mut().with(|step| match self.tokens {
            Some(tokens) => step.write_state_after(layer, part, tokens, state),
            None => step.write_state(layer, part, state),
        });
        written.map_err(candle_core::Error::wrap)
    }
}

/// Returns an error of the cache as candle's.
pub(crate) fn refused(error: PlanError) -> candle_core::Error {
    candle_core::Error::wrap(CacheError::from(error))
}

fn type_refused(dtype: DType) -> candle_core::Error {
    candle_core::Error::Msg(format!("state is {dtype:?}: it must be f32, f16 or bf16"))
}

/// Returns extents as the cache counts them.
fn extents(of: &[usize]) -> Result<Vec<u32>> {
    let extents = of.iter().map(|extent| u32::try_from(*extent).ok());
    match extents.collect() {
        Some(extents) => Ok(extents),
        None => bail!("too many values"),
    }
}
