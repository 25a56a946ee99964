//! A cache behind candle's own interface: one for each layer, which takes new rows and returns all.
use std::cell::RefCell;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::backend::BackendStorage;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::{CudaStorage, CudaStorageSlice};
use candle_core::{CpuStorage, CustomOp2, Device, Error as CandleError, Layout, Result, Shape};
use candle_core::{Tensor, bail};
use half::{bf16, f16};
use kv::backend::{AnyBackend, AnyBuffer, Plane};
use kv::{Axes, CacheSpec, Element, KvCache, SequenceId, StartOptions, Step, StepInput};
use kv::{TensorView, TensorViewMut};

use crate::axes::{DenseRows, as_passed, readable};
use crate::cache::CandleCache;
use crate::error::Error;
use crate::step::types_differ;

/// The rows of one layer, for code that keeps the signature of `candle_nn::kv_cache::KvCache`:
/// [`Self::append`] takes the new K and V and returns all of them.
///
/// This saves memory, not time: every call decodes all rows of its layer. A model that calls
/// [`CandleStep::attend`](crate::CandleStep::attend) instead reads them where they are.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use kv_candle::LayerCache;
/// use kv_candle::kv::{CacheSpec, KvFormat};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(4).format(KvFormat::Bf16);
/// let mut layers = LayerCache::for_model(&Device::Cpu, spec.paged(16, 8).build()?)?;
/// for tokens in [3, 1] {
///     let rows = Tensor::ones((1, 1, tokens, 4), DType::F32, &Device::Cpu)?;
///     for layer in &mut layers {
///         let (k, v) = layer.append(&rows, &rows)?;
///         assert_eq!(k.dims(), v.dims());
///     }
/// }
/// assert_eq!(layers[0].len(), 4);
/// layers[0].reset()?; // all layers of the model
/// # Ok(())
/// # }
/// ```
pub struct LayerCache {
    model: Arc<Mutex<Model>>,
    layer: u16,
}

/// What the layers of one model share.
#[derive(Debug)]
struct Model {
    kv: KvCache,
    /// Sequences of the batch; 0 before the first call.
    batch: u32,
    /// New tokens of each sequence in the open step.
    new: u32,
    /// Layers that the open step has.
    written: Vec<bool>,
}

impl LayerCache {
    /// Makes the caches of a model's layers over one cache, in order.
    ///
    /// # Errors
    /// [`Error::Rows`] for a spec with a window, which frees rows, with a tail, whose rows are read
    /// after a step alone, or with layers on demand; those of [`CandleCache::new`].
    pub fn for_model(device: &Device, spec: CacheSpec) -> std::result::Result<Vec<Self>, Error> {
        let refuse = |setting| Err(Error::Rows { setting });
        if spec.layers_on_demand() {
            return refuse("layers on demand");
        }
        if spec.groups().iter().any(|group| group.window().is_some()) {
            return refuse("a window");
        }
        if spec.groups().iter().any(|group| group.slot_map().has_tail()) {
            return refuse("a tail");
        }
        let kv = CandleCache::<AnyBackend>::new(device, spec)?.into_kv();
        let layers =
            kv.state().spec().groups().iter().map(|group| group.layers().len()).sum::<usize>();
        let layers = u16::try_from(layers).unwrap_or(u16::MAX);
        let written = vec![false; layers.into()];
        let model = Arc::new(Mutex::new(Model { kv, batch: 0, new: 0, written }));
        Ok((0..layers).map(|layer| Self { model: Arc::clone(&model), layer }).collect())
    }

    /// Appends the rows of new tokens, `[b, kv_heads, s, dim]`, and returns all rows of the layer,
    /// `[b, kv_heads, tokens, dim]`, in the element type of the new ones.
    ///
    /// Tokens count once every layer has them. If a layer appends twice before that, because the
    /// model failed in between, the tokens of the first time are dropped.
    ///
    /// # Errors
    /// candle's error with the words of the cache: a batch of another size than before
    /// [`Self::reset`], shapes or element types that do not fit, or too few blocks.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let (batch, heads, new, dim_k) = k.dims4()?;
        let dim_v = v.dims4()?.3;
        let (k, v) = (readable(k)?.0, readable(v)?.0);
        let mut model = self.lock();
        let tokens = model.begin(self.layer, (batch, new))?;
        let op = Append { model: RefCell::new(&mut model), layer: self.layer, tokens };
        let rows = match k.apply_op2_no_bwd(&v, &op) {
            Ok(rows) => rows,
            Err(error) => {
                model.give_up()?;
                return Err(error);
            }
        };
        model.end(self.layer)?;
        let size = |dim: usize| batch * tokens * heads * dim;
        let part = |from: usize, dim: usize| {
            let rows = rows.narrow(0, from, size(dim))?.reshape((batch, tokens, heads, dim))?;
            rows.transpose(1, 2)?.contiguous()
        };
        Ok((part(0, dim_k)?, part(size(dim_k), dim_v)?))
    }

    /// Returns the tokens of each sequence.
    pub fn len(&self) -> usize {
        let len = self.lock().kv.state().seq_len(SequenceId(0)).unwrap_or(0);
        usize::try_from(len).unwrap_or(usize::MAX)
    }

    /// Returns whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets all tokens of all layers of the model.
    ///
    /// # Errors
    /// candle's error if the device failed.
    pub fn reset(&mut self) -> Result<()> {
        self.lock().reset()
    }

    /// Lends the cache below, for statistics. `read` may call no layer of this model: it would wait
    /// for itself.
    pub fn with_kv<T>(&self, read: impl FnOnce(&KvCache) -> T) -> T {
        read(&self.lock().kv)
    }

    fn lock(&self) -> MutexGuard<'_, Model> {
        // A step that a panic left open is rolled back by the next pass.
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Names the layer alone: the cache prints its block tables and plans.
impl fmt::Debug for LayerCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerCache").field("layer", &self.layer).finish_non_exhaustive()
    }
}

impl Model {
    /// Lets a layer write: begins a step if none waits for it. Returns the tokens of a sequence,
    /// new ones included.
    fn begin(&mut self, layer: u16, (batch, new): (usize, usize)) -> Result<usize> {
        let [Ok(count), Ok(new)] = [batch, new].map(u32::try_from) else {
            bail!("too many tokens")
        };
        if self.batch != 0 && count != self.batch {
            bail!(
                "a batch of {count}, the cache has {}: reset it before another batch",
                self.batch
            );
        }
        if self.written.get(usize::from(layer)) == Some(&true) {
            drop(self.kv.held());
        }
        if !self.kv.state().is_step_open() {
            self.written.fill(false);
            self.start(count)?;
            let inputs = (0..count).map(|row| StepInput::count(SequenceId(row.into()), new));
            let inputs: Vec<_> = inputs.collect();
            let begun = self.kv.begin_step(&inputs).map(Step::hold);
            if let Err(error) = begun {
                self.give_up()?;
                return Err(CandleError::wrap(error));
            }
            self.new = new;
        }
        if new != self.new {
            bail!("{new} tokens, other layers have {} new ones", self.new);
        }
        let len = self.kv.state().seq_len(SequenceId(0)).unwrap_or(0);
        usize::try_from(len + new).map_err(CandleError::wrap)
    }

    fn start(&mut self, batch: u32) -> Result<()> {
        if self.batch != 0 {
            return Ok(());
        }
        for row in 0..batch {
            let options = StartOptions::default().with_reuse(false);
            let started = self.kv.start(SequenceId(row.into()), &[], options);
            if let Err(error) = started {
                self.kv.reset().map_err(CandleError::wrap)?;
                return Err(CandleError::wrap(error));
            }
        }
        self.batch = batch;
        Ok(())
    }

    /// Drops a step that no layer has rows in, and a batch that has no tokens: it binds nobody.
    fn give_up(&mut self) -> Result<()> {
        if self.written.contains(&true) {
            return Ok(());
        }
        drop(self.kv.held());
        if self.kv.state().seq_len(SequenceId(0)) == Some(0) { self.reset() } else { Ok(()) }
    }

    /// Notes that a layer has its rows; the last one ends the step.
    fn end(&mut self, layer: u16) -> Result<()> {
        self.written[usize::from(layer)] = true;
        if self.written.iter().all(|written| *written) {
            self.written.fill(false);
            let Some(step) = self.kv.held() else { bail!("no step is open") };
            step.commit().map_err(CandleError::wrap)?;
        }
        Ok(())
    }

    fn reset(&mut self) -> Result<()> {
        drop(self.kv.held());
        self.written.fill(false);
        self.batch = 0;
        self.kv.reset().map_err(CandleError::wrap)
    }
}

/// Writes the rows of a layer, and reads all of them: those of K, then those of V.
struct Append<'a> {
    model: RefCell<&'a mut Model>,
    layer: u16,
    tokens: usize,
}

/// How the tensors of one call lie.
struct Call {
    new: [DenseRows; 2],
    /// Dimensions of the rows of K, and of V: `[b, tokens, heads, dim]`.
    dims: [[u32; 4]; 2],
    /// Values of K, and of V.
    counts: [usize; 2],
}

impl Append<'_> {
    fn call(&self, layouts: [&Layout; 2]) -> Result<Call> {
        let [Some(k), Some(v)] = layouts.map(DenseRows::of) else {
            bail!("the values of all heads of a token do not lie together");
        };
        let Ok(tokens) = u32::try_from(self.tokens) else { bail!("too many tokens") };
        let dims = [k, v].map(|axes| {
            let [heads, dim] = axes.head();
            [axes.dims().first().copied().unwrap_or(0), tokens, heads, dim]
        });
        let counts = dims.map(|dims| {
            dims.iter().try_fold(1_usize, |all, size| all.checked_mul(usize::try_from(*size).ok()?))
        });
        let [Some(of_k), Some(of_v)] = counts else { bail!("too many values") };
        Ok(Call { new: [k, v], dims, counts: [of_k, of_v] })
    }

    fn run(
        &self,
        [k, v]: [TensorView<'_, AnyBuffer>; 2],
        rows: [TensorViewMut<'_, AnyBuffer>; 2],
    ) -> Result<()> {
        let mut model = self.model.borrow_mut();
        let Some(mut step) = model.kv.held() else { bail!("no step is open") };
        let mut done = step.write(self.layer, k, v, Axes::Bshd);
        for (plane, rows) in [Plane::Key, Plane::Value].into_iter().zip(rows) {
            done = done.and_then(|()| step.gather(self.layer, plane, rows, Axes::Bshd));
        }
        // Other layers may have written, and may go on.
        step.hold();
        done.map_err(|error| as_passed(error, Axes::Bshd))
    }

    fn on_host<T: Element + Default + Clone>(
        &self,
        [k, v]: [&[T]; 2],
        layouts: [&Layout; 2],
    ) -> Result<(Vec<T>, Shape)> {
        let call = self.call(layouts)?;
        let ([of_k, of_v], [count_k, count_v]) = (call.new, call.counts);
        let (Some(k), Some(v)) = (of_k.view(k), of_v.view(v)) else {
            bail!("a tensor is longer than its storage");
        };
        let mut rows = vec![T::default(); count_k + count_v];
        let (rows_k, rows_v) = rows.split_at_mut(count_k);
        let [dims_k, dims_v] = &call.dims;
        let out = [TensorViewMut::host(rows_k, dims_k), TensorViewMut::host(rows_v, dims_v)];
        self.run([k, v], out)?;
        let shape = Shape::from(rows.len());
        Ok((rows, shape))
    }

    #[cfg(feature = "cuda")]
    fn on_cuda<T: crate::cuda::Value>(
        &self,
        [k, v]: [&crate::cuda::Slice<T>; 2],
        layouts: [&Layout; 2],
        device: &candle_core::CudaDevice,
    ) -> Result<(CudaStorage, Shape)> {
        let call = self.call(layouts)?;
        let ([of_k, of_v], [count_k, count_v]) = (call.new, call.counts);
        let lender = crate::cuda::Lender::of(self.model.borrow().kv.backend())?;
        let count = count_k + count_v;
        let mut rows = device.alloc_zeros::<T>(count)?;
        let begin_v = u64::try_from(count_k * size_of::<T>()).unwrap_or(u64::MAX);
        lender.read(k, |k| {
            lender.read(v, |v| {
                lender.write(&mut rows, |rows| {
                    let [dims_k, dims_v] = &call.dims;
                    let rows_k = TensorViewMut::device(T::DTYPE, rows, 0, dims_k);
                    let rows_v = TensorViewMut::device(T::DTYPE, rows, begin_v, dims_v);
                    self.run([of_k.on::<T, _>(k), of_v.on::<T, _>(v)], [rows_k, rows_v])
                })
            })
        })?;
        Ok((CudaStorage::wrap_cuda_slice(rows, device.clone()), Shape::from(count)))
    }
}

impl CustomOp2 for Append<'_> {
    fn name(&self) -> &'static str {
        "kv-append"
    }

    fn cpu_fwd(
        &self,
        k: &CpuStorage,
        of_k: &Layout,
        v: &CpuStorage,
        of_v: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        use CpuStorage::{BF16, F16, F32};
        let layouts = [of_k, of_v];
        Ok(match (k, v) {
            (F32(k), F32(v)) => {
                let (rows, shape) = self.on_host::<f32>([k, v], layouts)?;
                (F32(rows), shape)
            }
            (F16(k), F16(v)) => {
                let (rows, shape) = self.on_host::<f16>([k, v], layouts)?;
                (F16(rows), shape)
            }
            (BF16(k), BF16(v)) => {
                let (rows, shape) = self.on_host::<bf16>([k, v], layouts)?;
                (BF16(rows), shape)
            }
            (k, v) => bail!("{}", types_differ(&[("k", k.dtype()), ("v", v.dtype())])),
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        k: &CudaStorage,
        of_k: &Layout,
        v: &CudaStorage,
        of_v: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        use CudaStorageSlice::{BF16, F16, F32};
        let layouts = [of_k, of_v];
        match (&k.slice, &v.slice) {
            (F32(a), F32(b)) => self.on_cuda([a, b], layouts, &k.device),
            (F16(a), F16(b)) => self.on_cuda([a, b], layouts, &k.device),
            (BF16(a), BF16(b)) => self.on_cuda([a, b], layouts, &k.device),
            _ => bail!("{}", types_differ(&[("k", k.dtype()), ("v", v.dtype())])),
        }
    }
}
