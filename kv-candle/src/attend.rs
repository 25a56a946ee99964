//! Attention as an operation of candle, which lends the storage of its tensors.
use std::cell::RefCell;

use candle_core::backend::BackendStorage;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::{CudaStorage, CudaStorageSlice};
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, bail};
use half::{bf16, f16};
use kv::backend::Backend;
use kv::{AttentionOptions, Element, TensorView, TensorViewMut};

use crate::axes::{DenseRows, as_passed};
use crate::step::{Held, types_differ};

/// Writes k and v, and attends q.
pub(crate) struct Attend<'a, 'c, B: Backend> {
    pub(crate) step: &'a RefCell<Held<'c, B>>,
    pub(crate) layer: u16,
    pub(crate) options: AttentionOptions<'a>,
}

/// How the tensors of one call lie.
struct Call {
    inputs: [DenseRows; 3],
    /// Dimensions of the output as the cache names them.
    dims: Vec<u32>,
    /// Values of the output.
    count: usize,
    /// Shape of the output as candle names it.
    shape: Shape,
}

impl Call {
    fn of(layouts: [&Layout; 3]) -> Result<Self> {
        let [Some(q), Some(k), Some(v)] = layouts.map(DenseRows::of) else {
            bail!("the values of all heads of a token do not lie together");
        };
        assert!(k.axes() == v.axes() && q.axes() == k.axes(), "the call has checked the axes");
        let mut dims = q.dims().as_slice().to_vec();
        let ([heads, _], [_, dim_v]) = (q.head(), v.head());
        if let Some(last) = dims.last_mut() {
            *last = dim_v;
        }
        let sizes = dims.iter().map(|size| usize::try_from(*size).ok());
        let Some(mut shape) = sizes.collect::<Option<Vec<_>>>() else { bail!("too many values") };
        let Some(count) = shape.iter().try_fold(1_usize, |all, size| all.checked_mul(*size)) else {
            bail!("too many values");
        };
        let width = u64::from(heads) * u64::from(dim_v);
        shape.truncate(shape.len().saturating_sub(2));
        shape.push(usize::try_from(width).unwrap_or(usize::MAX));
        Ok(Self { inputs: [q, k, v], dims, count, shape: shape.into() })
    }
}

impl<B: Backend> Attend<'_, '_, B> {
    fn on_host<T: Element + Default + Clone>(
        &self,
        [q, k, v]: [&[T]; 3],
        layouts: [&Layout; 3],
    ) -> Result<(Vec<T>, Shape)> {
        let call = Call::of(layouts)?;
        let [of_q, of_k, of_v] = call.inputs;
        let (Some(q), Some(k), Some(v)) = (of_q.view(q), of_k.view(k), of_v.view(v)) else {
            bail!("a tensor is longer than its storage");
        };
        let mut out = vec![T::default(); call.count];
        self.run(&call, [q, k, v], TensorViewMut::host(&mut out, &call.dims))?;
        Ok((out, call.shape))
    }

    #[cfg(feature = "cuda")]
    fn on_cuda<T: crate::cuda::Value>(
        &self,
        [q, k, v]: [&crate::cuda::Slice<T>; 3],
        layouts: [&Layout; 3],
        device: &candle_core::CudaDevice,
    ) -> Result<(CudaStorage, Shape)> {
        let call = Call::of(layouts)?;
        let [of_q, of_k, of_v] = call.inputs;
        let lender =
            self.step.borrow_mut().with(|step| crate::cuda::Lender::of(step.cache().backend()))?;
        let mut out = device.alloc_zeros::<T>(call.count)?;
        lender.read(q, |q| {
            lender.read(k, |k| {
                lender.read(v, |v| {
                    lender.write(&mut out, |out| {
                        let inputs = [of_q.on::<T, _>(q), of_k.on::<T, _>(k), of_v.on::<T, _>(v)];
                        let out = TensorViewMut::device(T::DTYPE, out, 0, &call.dims);
                        self.run(&call, inputs, out)
                    })
                })
            })
        })?;
        Ok((CudaStorage::wrap_cuda_slice(out, device.clone()), call.shape))
    }

    fn run(
        &self,
        call: &Call,
        [q, k, v]: [TensorView<'_, B::Buffer>; 3],
        out: TensorViewMut<'_, B::Buffer>,
    ) -> Result<()> {
        let [_, of_k, _] = call.inputs;
        let axes = of_k.axes();
        let options = self.options.with_axes(axes);
        let attended = self.step.borrow_mut().with(|step| {
            step.write(self.layer, k, v, axes)?;
            step.attend(self.layer, q, out, &options)
        });
        attended.map_err(|error| as_passed(error, axes))
    }
}

impl<B: Backend> CustomOp3 for Attend<'_, '_, B> {
    fn name(&self) -> &'static str {
        "kv-attend"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        of_q: &Layout,
        k: &CpuStorage,
        of_k: &Layout,
        v: &CpuStorage,
        of_v: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        use CpuStorage::{BF16, F16, F32};
        let layouts = [of_q, of_k, of_v];
        Ok(match (q, k, v) {
            (F32(q), F32(k), F32(v)) => {
                let (out, shape) = self.on_host::<f32>([q, k, v], layouts)?;
                (F32(out), shape)
            }
            (F16(q), F16(k), F16(v)) => {
                let (out, shape) = self.on_host::<f16>([q, k, v], layouts)?;
                (F16(out), shape)
            }
            (BF16(q), BF16(k), BF16(v)) => {
                let (out, shape) = self.on_host::<bf16>([q, k, v], layouts)?;
                (BF16(out), shape)
            }
            (q, k, v) => {
                let types = [("q", q.dtype()), ("k", k.dtype()), ("v", v.dtype())];
                bail!("{}", types_differ(&types))
            }
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        of_q: &Layout,
        k: &CudaStorage,
        of_k: &Layout,
        v: &CudaStorage,
        of_v: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        use CudaStorageSlice::{BF16, F16, F32};
        let layouts = [of_q, of_k, of_v];
        match (&q.slice, &k.slice, &v.slice) {
            (F32(a), F32(b), F32(c)) => self.on_cuda([a, b, c], layouts, &q.device),
            (F16(a), F16(b), F16(c)) => self.on_cuda([a, b, c], layouts, &q.device),
            (BF16(a), BF16(b), BF16(c)) => self.on_cuda([a, b, c], layouts, &q.device),
            _ => {
                let types = [("q", q.dtype()), ("k", k.dtype()), ("v", v.dtype())];
                bail!("{}", types_differ(&types))
            }
        }
    }
}
