//! Attention as an operation of candle, which lends the storage of its tensors.
use std::cell::RefCell;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, Error, Layout, Result, Shape, bail};
use half::{bf16, f16};
use kv::backend::Backend;
use kv::{AttentionOptions, Element, Step, TensorViewMut};

use crate::axes::Axes;
use crate::step::types_differ;

/// Writes k and v, and attends q.
pub(crate) struct Attend<'a, 'c, B: Backend> {
    pub(crate) step: &'a RefCell<Step<'c, B>>,
    pub(crate) layer: u16,
    pub(crate) options: AttentionOptions<'a>,
}

impl<B: Backend> Attend<'_, '_, B> {
    fn run<T: Element + Default + Clone>(
        &self,
        [q, k, v]: [(&[T], &Layout); 3],
    ) -> Result<(Vec<T>, Shape)> {
        let axes = |(_, layout): (_, &Layout)| Axes::of(layout);
        let (Some(of_q), Some(of_k), Some(of_v)) = (axes(q), axes(k), axes(v)) else {
            bail!("the values of all heads of a token do not lie together");
        };
        let (Some(q), Some(k), Some(v)) = (of_q.view(q.0), of_k.view(k.0), of_v.view(v.0)) else {
            bail!("a tensor is longer than its storage");
        };
        if of_k.format != of_v.format || of_q.format != of_k.format {
            bail!("q, k and v have different numbers of dimensions");
        }
        let mut dims = of_q.dims().to_vec();
        let ([heads, _], [_, dim_v]) = (of_q.head(), of_v.head());
        if let Some(last) = dims.last_mut() {
            *last = dim_v;
        }
        let sizes = dims.iter().map(|size| usize::try_from(*size).ok());
        let Some(sizes) = sizes.collect::<Option<Vec<_>>>() else { bail!("too many values") };
        let Some(count) = sizes.iter().try_fold(1_usize, |all, size| all.checked_mul(*size)) else {
            bail!("too many values");
        };
        let mut out = vec![T::default(); count];
        let mut step = self.step.borrow_mut();
        step.write(self.layer, k, v, of_k.format).map_err(Error::wrap)?;
        let options = self.options.with_qkv_format(of_q.format);
        let view = TensorViewMut::host(&mut out, &dims);
        step.attend(self.layer, q, view, &options).map_err(Error::wrap)?;
        let width = u64::from(heads).saturating_mul(dim_v.into());
        let mut shape = sizes;
        shape.truncate(shape.len().saturating_sub(2));
        shape.push(usize::try_from(width).unwrap_or(usize::MAX));
        Ok((out, Shape::from(shape)))
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
        Ok(match (q, k, v) {
            (F32(q), F32(k), F32(v)) => {
                let (out, shape) = self.run::<f32>([(q, of_q), (k, of_k), (v, of_v)])?;
                (F32(out), shape)
            }
            (F16(q), F16(k), F16(v)) => {
                let (out, shape) = self.run::<f16>([(q, of_q), (k, of_k), (v, of_v)])?;
                (F16(out), shape)
            }
            (BF16(q), BF16(k), BF16(v)) => {
                let (out, shape) = self.run::<bf16>([(q, of_q), (k, of_k), (v, of_v)])?;
                (BF16(out), shape)
            }
            (q, k, v) => {
                let types = [("q", q.dtype()), ("k", k.dtype()), ("v", v.dtype())];
                bail!("{}", types_differ(&types))
            }
        })
    }
}
