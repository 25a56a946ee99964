//! `InferenceParams`: its constructor, its steps, and managers of the caller's own.
mod construct;
mod lifecycle;
mod managers;
mod random;
mod refusals;

use kv_compat::{InferenceConfig, InferenceParams};
use kv_core::backend::NullBackend;
use kv_core::error::PlanError;
use kv_core::{CacheError, DType, TensorView, TensorViewMut};

pub(crate) type Params = InferenceParams<NullBackend>;

/// 4 sequences of 16 tokens, 2 heads of 4, f32: the configuration of the recorded errors.
pub(crate) fn config() -> InferenceConfig {
    InferenceConfig::new(4, 16).num_heads_kv(2).head_dim_k(4).dtype(DType::F32)
}

pub(crate) fn paged(page_size: u32, total: u32) -> InferenceConfig {
    config().is_paged(true).page_size(page_size).total_num_pages(total)
}

pub(crate) fn params(config: InferenceConfig) -> Params {
    InferenceParams::new(NullBackend::new(), config).unwrap()
}

/// Both modes, layer 1 allocated.
pub(crate) fn both() -> [Params; 2] {
    [config(), paged(4, 16)].map(|config| {
        let mut params = params(config);
        params.allocate_memory(1).unwrap();
        params
    })
}

pub(crate) fn pre_step(params: &mut Params, step: &[(u64, u32)]) -> Result<(), CacheError> {
    params.pre_step(step)
}

/// Writes zeros of `[t, 2, 4]`, `t` large enough for any step here.
pub(crate) fn write(params: &mut Params, layer: usize) -> Result<(), CacheError> {
    let rows = vec![0.0_f32; 64 * 8];
    let view = TensorView::host(&rows, &[64, 2, 4]);
    params.step(layer, view, view, "thd").map(|_| ())
}

/// One whole step over layer 1.
pub(crate) fn run(params: &mut Params, step: &[(u64, u32)]) {
    pre_step(params, step).unwrap();
    write(params, 1).unwrap();
}

/// Everything a caller can see of the state.
#[derive(Debug, PartialEq)]
pub(crate) struct State {
    pub(crate) sequences: Vec<(u64, u32)>,
    pub(crate) cu_q: Vec<u32>,
    pub(crate) cu_kv: Vec<u32>,
    pub(crate) pre: Vec<u32>,
    pub(crate) table: Vec<u32>,
    pub(crate) free: u32,
}

pub(crate) fn state(params: &Params) -> State {
    State {
        sequences: params.sequences().iter().map(|row| (row.id.0, row.len)).collect(),
        cu_q: params.cu_seqlens_q().to_vec(),
        cu_kv: params.cu_seqlens_kv().to_vec(),
        pre: params.get_seqlens_pre_step().to_vec(),
        table: params.page_table().to_vec(),
        free: params.num_free_pages(),
    }
}

pub(crate) fn lens(params: &Params) -> Vec<(u64, u32)> {
    state(params).sequences
}

/// The plan error inside, which every refusal of data is.
pub(crate) fn refusal<T: std::fmt::Debug>(result: Result<T, CacheError>) -> PlanError {
    match result {
        Err(CacheError::Plan(error)) => error,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

pub(crate) fn out(
    values: &mut [f32],
    tokens: u32,
) -> TensorViewMut<'_, kv_core::backend::NullBuffer> {
    TensorViewMut::host(values, &[tokens, 2, 4])
}
