//! The constructor: every argument, every default, every refusal.
use kv_compat::{InferenceConfig, InferenceParams, OutputFormat};
use kv_core::backend::NullBackend;
use kv_core::error::{PlanError, SpecError};
use kv_core::{Axes, CacheError, DType};

use super::{config, paged, params};

fn spec_error(config: InferenceConfig) -> SpecError {
    match InferenceParams::new(NullBackend::new(), config) {
        Err(CacheError::Spec(error)) => error,
        other => panic!("expected a SpecError, got {other:?}"),
    }
}

#[test]
fn required_arguments_are_named_when_missing() {
    let base = || InferenceConfig::new(4, 16);
    let missing = |field| SpecError::Missing { field };
    let heads = base().head_dim_k(4).dtype(DType::F32);
    assert_eq!(spec_error(heads), missing("num_heads_kv"));
    let dim = base().num_heads_kv(2).dtype(DType::F32);
    assert_eq!(spec_error(dim), missing("head_dim_k"));
    assert_eq!(spec_error(base().num_heads_kv(2).head_dim_k(4)), missing("dtype"));
}

#[test]
fn zero_is_refused_wherever_a_count_is_meant() {
    let zero = |field| SpecError::Zero { field };
    let filled = |b, s| InferenceConfig::new(b, s).num_heads_kv(2).head_dim_k(4).dtype(DType::F32);
    assert_eq!(spec_error(filled(0, 16)), zero("max_batch_size"));
    assert_eq!(spec_error(filled(4, 0)), zero("max_sequence_length"));
    assert_eq!(spec_error(config().num_heads_kv(0)), zero("num_heads_kv"));
    assert_eq!(spec_error(config().head_dim_k(0)), zero("head_dim_k"));
    assert_eq!(spec_error(config().head_dim_v(0)), zero("head_dim_v"));
    assert_eq!(spec_error(paged(0, 16)), zero("page_size"));
    assert_eq!(spec_error(paged(4, 0)), zero("total_num_pages"));
    assert_eq!(spec_error(config().max_ctx_len(0)), zero("max_ctx_len"));
}

#[test]
fn pages_are_checked_only_when_paged() {
    let missing = |field| SpecError::Missing { field };
    let bare = || config().is_paged(true);
    assert_eq!(spec_error(bare()), missing("page_size"));
    assert_eq!(spec_error(bare().page_size(4)), missing("total_num_pages"));
    let not_divisible = SpecError::NotDivisible {
        field: "max_sequence_length",
        got: 16,
        of: "page_size",
        divisor: 3,
    };
    assert_eq!(spec_error(paged(3, 20)), not_divisible);
    let ignored = params(config().page_size(3).total_num_pages(1));
    assert!(!ignored.is_paged());
    assert_eq!(ignored.num_free_pages(), 4);
}

#[test]
fn a_pool_may_be_smaller_or_larger_than_the_worst_case() {
    for total in [1, 15, 17, 1000] {
        assert_eq!(params(paged(4, total)).num_free_pages(), total);
    }
}

#[test]
fn a_pool_too_large_for_its_numbers_is_refused() {
    let overflow = SpecError::Overflow { what: "num_blocks * block_size" };
    assert_eq!(spec_error(paged(16, u32::MAX)), overflow);
}

#[test]
fn defaults_and_display_are_the_originals() {
    let plain = params(config());
    assert_eq!(plain.input_qkv_format(), Axes::Bshd);
    assert_eq!(plain.output_qkv_format(), OutputFormat::Bshd);
    assert_eq!(plain.cache_qkv_format(), Axes::Bshd);
    assert_eq!((plain.max_ctx_len(), plain.is_paged()), (None, false));
    assert_eq!(
        plain.to_string(),
        "dtype=f32, is_paged=false, max_batch_size=4, max_seqlen=16, num_heads=2, head_dim_k=4, \
         head_dim_v=4"
    );
    let paged = params(paged(4, 16).head_dim_v(6));
    assert_eq!(
        paged.to_string(),
        "dtype=f32, is_paged=true, total_pages=16, page_size=4, num_heads=2, head_dim_k=4, \
         head_dim_v=6"
    );
}

#[test]
fn a_format_is_parsed_at_construction() {
    for (name, format, output) in [
        ("bshd", Axes::Bshd, "bshd"),
        ("sbhd", Axes::Sbhd, "sbhd_2bshd"),
        ("thd", Axes::Thd, "thd_2bshd"),
    ] {
        let by_name = params(config().max_ctx_len(8).qkv_format(name));
        let by_value = params(config().max_ctx_len(8).qkv_format(format));
        assert_eq!(by_name.input_qkv_format(), by_value.input_qkv_format());
        assert_eq!(by_name.output_qkv_format().to_string(), output);
    }
    for name in ["foo", "thd_2bshd", "BSHD", ""] {
        let refused = InferenceParams::new(NullBackend::new(), config().qkv_format(name));
        assert!(
            matches!(refused, Err(CacheError::Plan(PlanError::Name(_)))),
            "{name}: {refused:?}"
        );
    }
}

#[test]
fn a_longest_prompt_is_kept_for_every_format_and_checked() {
    assert_eq!(spec_error(config().qkv_format("thd")), SpecError::Missing { field: "max_ctx_len" });
    for format in ["bshd", "sbhd", "thd"] {
        let kept = params(config().qkv_format(format).max_ctx_len(16));
        assert_eq!(kept.max_ctx_len(), Some(16));
        let too_large = SpecError::TooLarge { field: "max_ctx_len", got: 99, max: 16 };
        assert_eq!(spec_error(config().qkv_format(format).max_ctx_len(99)), too_large);
    }
}

#[test]
fn an_element_type_that_cannot_be_stored_is_refused() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        assert_eq!(params(config().dtype(dtype)).config().dtype, dtype);
    }
    let refused = InferenceParams::new(NullBackend::new(), config().dtype(DType::U32));
    assert!(matches!(refused, Err(CacheError::Plan(PlanError::ElementType { .. }))));
}
