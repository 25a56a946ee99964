//! Managers of the caller's own.
use kv_compat::{
    BlockManager, CacheManager, CacheManagerConfig, InferenceParams, PageConfig, TrackedSequence,
};
use kv_core::backend::{AnyBackend, Backend, NullBackend, Plane, PlaneView};
use kv_core::error::PlanError;
use kv_core::plan::AttentionOptions;
use kv_core::{
    Axes, BlockId, BlockOrder, CacheError, DType, SequenceId, TensorView, TensorViewMut,
};

use super::{config, paged, refusal};

type Buf<B> = <B as Backend>::Buffer;

/// The built-in manager, whose `sequences` are in the wrong order.
#[derive(Debug)]
struct Liar<B: Backend> {
    inner: BlockManager<B>,
    reversed: Vec<TrackedSequence>,
}

impl<B: Backend> CacheManager<B> for Liar<B> {
    fn backend(&self) -> &B {
        self.inner.backend()
    }
    fn queue_mut(&mut self) -> &mut B::Queue {
        self.inner.queue_mut()
    }
    fn allocate_memory(&mut self, layer: usize) -> Result<bool, CacheError> {
        self.inner.allocate_memory(layer)
    }
    fn reset(&mut self) -> Result<(), CacheError> {
        self.inner.reset()
    }
    fn pre_step(&mut self, step: &[(SequenceId, u32)]) -> Result<(), CacheError> {
        self.inner.pre_step(step)?;
        self.reversed = self.inner.sequences().iter().rev().copied().collect();
        Ok(())
    }
    fn roll_back(&mut self) {
        self.inner.roll_back();
    }
    fn step(
        &mut self,
        layer: usize,
        kv: [TensorView<'_, Buf<B>>; 2],
        format: Axes,
    ) -> Result<(), CacheError> {
        self.inner.step(layer, kv, format)
    }
    fn attend(
        &mut self,
        layer: usize,
        q: TensorView<'_, Buf<B>>,
        outputs: (TensorViewMut<'_, Buf<B>>, Option<TensorViewMut<'_, Buf<B>>>),
        options: &AttentionOptions<'_>,
    ) -> Result<(), CacheError> {
        self.inner.attend(layer, q, outputs, options)
    }
    fn gather(
        &mut self,
        layer: usize,
        plane: Plane,
        out: TensorViewMut<'_, Buf<B>>,
    ) -> Result<(), CacheError> {
        self.inner.gather(layer, plane, out)
    }
    fn sequences(&self) -> &[TrackedSequence] {
        &self.reversed
    }
    fn pages(&self, sequence: SequenceId) -> &[BlockId] {
        self.inner.pages(sequence)
    }
    fn num_free_pages(&self) -> u32 {
        self.inner.num_free_pages()
    }
    fn plane(&self, _layer: usize, _plane: Plane) -> Option<PlaneView<'_, Buf<B>>> {
        None
    }
}

#[test]
fn a_factory_gets_the_keywords_of_the_original() {
    let mut seen = Vec::new();
    for config in [config().head_dim_v(6), paged(4, 7), config().page_size(3)] {
        InferenceParams::with_manager(NullBackend::new(), config, |backend, config| {
            seen.push(*config);
            config.build(backend)
        })
        .unwrap();
    }
    let plain = CacheManagerConfig {
        max_batch_size: 4,
        max_seqlen: 16,
        num_heads: 2,
        head_dim_k: 4,
        dtype: DType::F32,
        head_dim_v: 6,
        pages: None,
    };
    let pages = Some(PageConfig { total_num_pages: 7, page_size: 4 });
    let pooled = CacheManagerConfig { head_dim_v: 4, pages, ..plain };
    assert_eq!(seen, [plain, pooled, CacheManagerConfig { head_dim_v: 4, ..plain }]);
}

#[test]
fn a_factory_is_not_asked_about_an_impossible_configuration() {
    let refused = InferenceParams::with_manager(NullBackend::new(), paged(3, 7), |_, _| {
        panic!("asked about a page size that does not divide")
    });
    assert!(matches!(refused, Err(CacheError::Spec(_))));
}

#[test]
fn a_manager_that_tracks_other_rows_is_found_out() {
    let mut params = InferenceParams::with_manager(NullBackend::new(), config(), |backend, c| {
        Ok(Box::new(Liar { inner: BlockManager::new(backend, c)?, reversed: Vec::new() }))
    })
    .unwrap();
    params.allocate_memory(1).unwrap();
    let state = |error| matches!(error, PlanError::State { .. });
    assert!(state(refusal(params.pre_step(&[(0_u64, 1), (1, 2)]))));
    assert_eq!(params.cu_seqlens_q(), [0; 5]);
    params.pre_step(&[(0_u64, 1)]).unwrap();
    let rows = [0.0_f32; 8];
    let view = TensorView::host(&rows, &[1, 1, 2, 4]);
    assert!(state(refusal(params.step(1, view, view, "bshd"))), "it has no plane to show");
}

#[test]
fn the_order_inside_a_page_is_a_choice() {
    for (order, config) in [(BlockOrder::Nhd, paged(4, 7)), (BlockOrder::Hnd, paged(4, 7))] {
        let mut params = InferenceParams::with_manager(NullBackend::new(), config, |b, c| {
            Ok(Box::new(BlockManager::with_block_order(b, c, order)?))
        })
        .unwrap();
        params.allocate_memory(1).unwrap();
        params.pre_step(&[(0_u64, 1)]).unwrap();
        let rows = [0.0_f32; 8];
        let view = TensorView::host(&rows, &[1, 1, 2, 4]);
        let output = params.step(1, view, view, "bshd").unwrap();
        assert_eq!(output.k.plane().layout().order(), order);
    }
}

#[test]
fn a_backend_chosen_at_run_time_will_do() {
    let backend = AnyBackend::new(NullBackend::new());
    let mut params: InferenceParams = InferenceParams::new(backend, paged(4, 7)).unwrap();
    params.allocate_memory(1).unwrap();
    params.pre_step(&[(0_u64, 5)]).unwrap();
    let rows = [0.0_f32; 5 * 8];
    let view = TensorView::host(&rows, &[5, 2, 4]);
    params.step(1, view, view, Axes::Thd).unwrap();
    assert_eq!(params.page_count(0), 2);
}

#[test]
fn a_wrapped_manager_refuses_an_impossible_pool_itself() {
    let config = CacheManagerConfig {
        max_batch_size: 4,
        max_seqlen: 16,
        num_heads: 2,
        head_dim_k: 4,
        dtype: DType::F32,
        head_dim_v: 4,
        pages: Some(PageConfig { total_num_pages: 3, page_size: 0 }),
    };
    assert!(matches!(config.build(NullBackend::new()), Err(CacheError::Spec(_))));
}
