//! Shared by the TransformerEngine vectors: configurations, tensors of published values, state.
use kv_compat::{InferenceConfig, InferenceParams};
use kv_core::backend::{AnyBackend, AnyBuffer, Backend};
use kv_core::{Axes, BlockId, DType, SequenceId};
use serde::Deserialize;

use crate::case::{CaseError, ensure};
use crate::device::{Place, Staged, dim};
use crate::rng::mix;
use crate::tokens::TokenLayout;

/// Larger memory and tensors are taken for an error in the file.
const ELEMENTS_MAX: u64 = 1 << 28;

/// Constructor arguments of `InferenceParams`, as a file gives them.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Config {
    pub(crate) max_batch_size: u32,
    pub(crate) max_sequence_length: u32,
    pub(crate) num_heads_kv: Option<u32>,
    pub(crate) head_dim_k: Option<u32>,
    pub(crate) head_dim_v: Option<u32>,
    pub(crate) dtype: Option<String>,
    pub(crate) max_ctx_len: Option<u32>,
    pub(crate) qkv_format: Option<String>,
    pub(crate) layers: Option<u16>,
    #[serde(default)]
    pub(crate) is_paged: bool,
    pub(crate) page_size: Option<u32>,
    pub(crate) total_num_pages: Option<u32>,
}

impl Config {
    /// Returns the number of layers to allocate.
    pub(crate) fn layers(&self) -> u16 {
        self.layers.unwrap_or(1)
    }
    /// Returns the same configuration with `head_dim`s that the device supports.
    pub(crate) fn fitted(&self, backend: &AnyBackend) -> Self {
        let fit = |wanted: Option<u32>| wanted.map(|wanted| dim(backend, wanted));
        let (head_dim_k, head_dim_v) = (fit(self.head_dim_k), fit(self.head_dim_v));
        Self { head_dim_k, head_dim_v, ..self.clone() }
    }
    /// Returns heads and dim of K and V.
    pub(crate) fn heads_dims(&self) -> [[usize; 2]; 2] {
        let dk = self.head_dim_k.unwrap_or(0);
        let heads = self.num_heads_kv.unwrap_or(0) as usize;
        [dk, self.head_dim_v.unwrap_or(dk)].map(|dim| [heads, dim as usize])
    }
    /// Returns the element type.
    pub(crate) fn element(&self) -> Result<DType, CaseError> {
        let name = self.dtype.as_deref().unwrap_or_default();
        name.parse().map_err(|error| CaseError::Broken(format!("config: {error}")))
    }

    /// Returns the same arguments for this library.
    pub(crate) fn ours(&self) -> Result<InferenceConfig, CaseError> {
        let mut config = InferenceConfig::new(self.max_batch_size, self.max_sequence_length)
            .is_paged(self.is_paged);
        if let Some(heads) = self.num_heads_kv {
            config = config.num_heads_kv(heads);
        }
        if let Some(dim) = self.head_dim_k {
            config = config.head_dim_k(dim);
        }
        if let Some(dim) = self.head_dim_v {
            config = config.head_dim_v(dim);
        }
        if self.dtype.is_some() {
            config = config.dtype(self.element()?);
        }
        if let Some(tokens) = self.page_size {
            config = config.page_size(tokens);
        }
        if let Some(pages) = self.total_num_pages {
            config = config.total_num_pages(pages);
        }
        if let Some(name) = &self.qkv_format {
            config = config.qkv_format(name);
        }
        if let Some(tokens) = self.max_ctx_len {
            config = config.max_ctx_len(tokens);
        }
        Ok(config)
    }

    /// Refuses a geometry that no golden file needs.
    pub(crate) fn check_size(&self) -> Result<(), CaseError> {
        let tokens = match (self.is_paged, self.page_size, self.total_num_pages) {
            (true, Some(size), Some(pages)) => u64::from(size) * u64::from(pages),
            _ => u64::from(self.max_batch_size) * u64::from(self.max_sequence_length),
        };
        let widths = self.heads_dims().map(|[heads, dim]| (heads * dim) as u64);
        let elements = tokens * (widths[0] + widths[1]) * u64::from(self.layers());
        ensure(elements <= ELEMENTS_MAX, || {
            format!("config: {elements} elements are more than a golden file needs")
        })
    }

    /// Opens a cache and allocates its layers, numbered from 1.
    pub(crate) fn open(&self, backend: &AnyBackend) -> Result<InferenceParams, CaseError> {
        self.check_size()?;
        let mut params = InferenceParams::new(backend.clone(), self.ours()?)?;
        for layer in 1..=usize::from(self.layers()) {
            params.allocate_memory(layer)?;
        }
        Ok(params)
    }
}

/// Axes of the tensors of one run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Form {
    pub(crate) axes: Axes,
    /// Batch entries and tokens of a padded tensor.
    pub(crate) padded: Option<[usize; 2]>,
}

impl Form {
    /// Returns the layout of tensors for entries of `lens` tokens.
    pub(crate) fn layout(self, lens: &[usize], [heads, dim]: [usize; 2]) -> TokenLayout {
        let mut layout = crate::fixture::dense(self.axes, lens, [heads, dim]);
        if let Some([batch, tokens]) = self.padded {
            let total = if self.axes == Axes::Thd { batch * tokens } else { tokens };
            layout.batch = layout.batch.max(batch);
            layout.tokens = layout.tokens.max(total);
        }
        layout
    }
}

/// Makes rows of a sequence from one position on.
pub(crate) fn rows(
    id: u64,
    positions: std::ops::Range<u32>,
    place: [u32; 2],
    shape: [usize; 2],
) -> Vec<f32> {
    let [kv, layer] = place;
    let mut values = Vec::new();
    for pos in positions {
        for head in 0..shape[0] as u32 {
            for dim in 0..shape[1] as u32 {
                values.push(mix([id as u32, pos, head, dim, kv, layer]));
            }
        }
    }
    values
}

/// One sequence of a step: id, length before, new tokens.
pub(crate) type Entry = (u64, u32, u32);

/// Writes a step's published values to one layer; returns the shapes that `step` returns.
pub(crate) fn write(
    backend: &AnyBackend,
    params: &mut InferenceParams,
    config: &Config,
    (layer, entries): (u16, &[Entry]),
    form: Form,
) -> Result<[[u32; 4]; 2], CaseError> {
    let lens: Vec<_> = entries.iter().map(|entry| entry.2 as usize).collect();
    let mut staged = Vec::new();
    for (kv, shape) in (0_u32..).zip(config.heads_dims()) {
        let layout = form.layout(&lens, shape);
        let place = [kv, u32::from(layer)];
        let values: Vec<_> = entries
            .iter()
            .map(|(id, before, new)| rows(*id, *before..before + new, place, shape))
            .collect();
        // Padding holds 3, which must never reach the cache.
        let tensor = layout.pack(config.element()?, &values, 3.0);
        let queue = params.queue_mut();
        staged.push(Staged::new(backend, queue, (layout, tensor), Place::Host)?);
    }
    let [k, v] = [staged[0].view(), staged[1].view()];
    let output = params.step(usize::from(layer), k, v, form.axes)?;
    Ok([output.k.shape(), output.v.shape()])
}

/// Reads cached K and V of one layer, by entry of the step, in the cache's own type.
pub(crate) fn cached(
    backend: &AnyBackend,
    params: &mut InferenceParams,
    config: &Config,
    layer: u16,
) -> Result<[Vec<Vec<f32>>; 2], CaseError> {
    let lens: Vec<_> = params.sequences().iter().map(|row| row.len as usize).collect();
    let form = Form { axes: Axes::Bshd, padded: None };
    let layouts = config.heads_dims().map(|shape| form.layout(&lens, shape));
    let element = config.element()?;
    let capabilities = backend.capabilities().clone();
    let queue = params.queue_mut();
    let mut k = Staged::output(backend, queue, (layouts[0], element), Place::Device)?;
    let mut v = Staged::output(backend, queue, (layouts[1], element), Place::Device)?;
    params.convert_paged_to_nonpaged(usize::from(layer), k.view_mut(), v.view_mut())?;
    let mut read = |staged: &mut Staged<AnyBuffer>| -> Result<_, CaseError> {
        let layout = staged.layout;
        let tensor = staged.read(&capabilities, params.queue_mut())?;
        Ok(layout.unpack("gathered rows", tensor, &lens, 0.0)?)
    };
    Ok([read(&mut k)?, read(&mut v)?])
}

/// Compares the cached rows of every sequence of the step with the published values.
pub(crate) fn check_content(
    backend: &AnyBackend,
    params: &mut InferenceParams,
    config: &Config,
) -> Result<(), CaseError> {
    let live: Vec<_> = params.sequences().iter().map(|row| (row.id.0, row.len)).collect();
    for layer in 1..=config.layers() {
        let planes = cached(backend, params, config, layer)?;
        for (kv, (plane, shape)) in (0_u32..).zip(planes.iter().zip(config.heads_dims())) {
            for ((id, len), got) in live.iter().zip(plane) {
                let expected = rows(*id, 0..*len, [kv, u32::from(layer)], shape);
                let place = format!("sequence {id}, layer {layer}, kv {kv}");
                let compared = crate::fixture::check_rows(got, &expected, shape[0] * shape[1]);
                crate::case::At::at(compared, place)?;
            }
        }
    }
    Ok(())
}

/// Returns the FNV-1a-64 hash of the codes of K, then V.
pub(crate) fn hash(k: &[f32], v: &[f32]) -> String {
    let code = |value: &f32| (value * 64.0) as i8 as u8;
    let mut hash = 0xCBF2_9CE4_8422_2325_u64;
    for byte in k.iter().chain(v).map(code) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3);
    }
    format!("{hash:016x}")
}

/// The state that a refused call must not change.
#[derive(Debug, PartialEq)]
pub(crate) struct State {
    rows: Vec<(SequenceId, u32, u32, Vec<BlockId>)>,
    arrays: [Vec<u32>; 4],
    free: u32,
}

/// Reads the visible state of a cache.
pub(crate) fn state(params: &InferenceParams) -> State {
    let rows = params.sequences().iter();
    let rows =
        rows.map(|row| (row.id, row.pre_step_len, row.len, params.page_list(row.id).to_vec()));
    let arrays = [
        params.cu_seqlens_q(),
        params.cu_seqlens_kv(),
        params.get_seqlens_pre_step(),
        params.page_table(),
    ];
    State {
        rows: rows.collect(),
        arrays: arrays.map(<[u32]>::to_vec),
        free: params.num_free_pages(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::mix_code;

    #[test]
    fn hashes_by_hand() {
        // One byte 0 and one byte 0x40 (value 1).
        let step = |hash: u64, byte: u64| (hash ^ byte).wrapping_mul(0x0000_0100_0000_01B3);
        let expected = step(step(0xCBF2_9CE4_8422_2325, 0), 0x40);
        assert_eq!(hash(&[0.0], &[1.0]), format!("{expected:016x}"));
        assert_eq!(mix_code([0; 6]), (mix([0; 6]) * 64.0) as i8);
    }
}
