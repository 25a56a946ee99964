//! Steps that are accepted: lengths, rows, pages, arrays, shapes.
use kv_compat::InferenceParams;
use kv_core::backend::{NullBackend, NullControl};
use kv_core::{CacheError, DType, TensorView, TensorViewMut};

use super::{Params, both, config, lens, paged, params, pre_step, run, state, write};

/// What the original's callers see after a step, `[b]`, padded as recorded.
fn check(params: &Params, lens_after: &[(u64, u32)], pre: &[u32], cu_q: &[u32], cu_kv: &[u32]) {
    assert_eq!(lens(params), lens_after);
    assert_eq!(params.batch_size(), lens_after.len());
    assert_eq!(params.get_seqlens_pre_step(), pre);
    assert_eq!(params.cu_seqlens_q(), cu_q);
    assert_eq!(params.cu_seqlens_kv(), cu_kv);
    check_table(params);
}

/// Row `i` of the table holds the pages of sequence `i`, no page has two owners, the rest is 0.
fn check_table(params: &Params) {
    let width = params.page_table_width();
    let mut seen = std::collections::HashSet::new();
    let mut used = 0;
    for (row, entries) in params.page_table().chunks(width).enumerate() {
        let sequence = params.sequences().get(row);
        let pages = sequence.map_or(&[][..], |s| params.page_list(s.id));
        let tokens_per_page = params.config().pages.map_or(16, |pages| pages.page_size);
        let len = sequence.map_or(0, |s| s.len);
        assert_eq!(pages.len(), len.div_ceil(tokens_per_page) as usize);
        for (index, entry) in entries.iter().enumerate() {
            assert_eq!(*entry, pages.get(index).map_or(0, |page| page.0));
        }
        assert!(pages.iter().all(|page| seen.insert(*page)), "a page has two owners");
        used += pages.len();
    }
    let total = params.config().pages.map_or(4, |pages| pages.total_num_pages);
    assert_eq!(params.num_free_pages() as usize, total as usize - used);
}

#[test]
fn a_live_sequence_may_bring_any_number_of_tokens() {
    for mut params in both() {
        // Chunked prefill: the original counts one token and overwrites the rest.
        run(&mut params, &[(0, 3)]);
        run(&mut params, &[(0, 4)]);
        check(&params, &[(0, 7)], &[3, 0, 0, 0], &[0, 4, 4, 4, 4], &[0, 7, 7, 7, 7]);
    }
    for mut params in both() {
        // Speculative tokens.
        run(&mut params, &[(0, 3), (1, 4)]);
        run(&mut params, &[(0, 2), (1, 1)]);
        check(&params, &[(0, 5), (1, 5)], &[3, 4, 0, 0], &[0, 2, 3, 3, 3], &[0, 5, 10, 10, 10]);
    }
}

#[test]
fn row_i_is_entry_i_whatever_the_order() {
    for mut params in both() {
        run(&mut params, &[(0, 3), (1, 5)]);
        let pages = [0_u64, 1].map(|id| params.page_list(id).to_vec());
        run(&mut params, &[(1, 1), (0, 1)]);
        check(&params, &[(1, 6), (0, 4)], &[5, 3, 0, 0], &[0, 1, 2, 2, 2], &[0, 6, 10, 10, 10]);
        assert_eq!([0_u64, 1].map(|id| params.page_list(id).to_vec()), pages, "nothing moved");
    }
    for mut params in both() {
        // The pattern of the original's own docstring: an arrival before live sequences.
        run(&mut params, &[(2, 3), (3, 5)]);
        run(&mut params, &[(0, 10), (2, 1), (3, 1)]);
        let lens = [(0, 10), (2, 4), (3, 6)];
        check(&params, &lens, &[0, 3, 5, 0], &[0, 10, 11, 12, 12], &[0, 10, 14, 20, 20]);
    }
    for mut params in both() {
        run(&mut params, &[(6, 2), (7, 3), (8, 9)]);
        let lens = [(6, 2), (7, 3), (8, 9)];
        check(&params, &lens, &[0; 4], &[0, 2, 5, 14, 14], &[0, 2, 5, 14, 14]);
    }
    for mut params in both() {
        run(&mut params, &[(5, 2), (2, 9)]);
        check(&params, &[(5, 2), (2, 9)], &[0; 4], &[0, 2, 11, 11, 11], &[0, 2, 11, 11, 11]);
    }
}

#[test]
fn no_tokens_leave_a_length_as_it_is() {
    for mut params in both() {
        run(&mut params, &[(0, 3), (1, 2)]);
        run(&mut params, &[(0, 0), (1, 1)]);
        check(&params, &[(0, 3), (1, 3)], &[3, 2, 0, 0], &[0, 0, 1, 1, 1], &[0, 3, 6, 6, 6]);
    }
    for mut params in both() {
        // A new sequence may have a row before it has a token.
        run(&mut params, &[(0, 0), (1, 1)]);
        check(&params, &[(0, 0), (1, 1)], &[0; 4], &[0, 0, 1, 1, 1], &[0, 0, 1, 1, 1]);
        assert_eq!(params.page_count(0), 0);
        run(&mut params, &[(0, 5), (1, 0)]);
        check(&params, &[(0, 5), (1, 1)], &[0, 1, 0, 0], &[0, 5, 5, 5, 5], &[0, 5, 6, 6, 6]);
    }
}

#[test]
fn absence_is_the_end_and_an_empty_step_ends_all() {
    for mut params in both() {
        run(&mut params, &[(0, 3), (1, 4), (2, 5)]);
        run(&mut params, &[(0, 1), (2, 1)]);
        check(&params, &[(0, 4), (2, 6)], &[3, 5, 0, 0], &[0, 1, 2, 2, 2], &[0, 4, 10, 10, 10]);
        // The id begins anew.
        run(&mut params, &[(1, 2), (2, 1)]);
        check(&params, &[(1, 2), (2, 7)], &[0, 6, 0, 0], &[0, 2, 3, 3, 3], &[0, 2, 9, 9, 9]);
        pre_step(&mut params, &[]).unwrap();
        check(&params, &[], &[0; 4], &[0; 5], &[0; 5]);
        let nothing = TensorView::host::<f32>(&[], &[0, 1, 2, 4]);
        params.step(1, nothing, nothing, "bshd").unwrap();
        pre_step(&mut params, &[]).unwrap();
        run(&mut params, &[(1, 2)]);
        check(&params, &[(1, 2)], &[0; 4], &[0, 2, 2, 2, 2], &[0, 2, 2, 2, 2]);
    }
}

#[test]
fn pages_that_departures_free_serve_the_same_step() {
    // Two pages, both held; the arrival needs both.
    let mut params = params(paged(8, 2));
    params.allocate_memory(1).unwrap();
    run(&mut params, &[(0, 9)]);
    assert!(!params.has_free_page());
    let stays = pre_step(&mut params, &[(0, 1), (1, 1)]);
    assert!(matches!(stays, Err(CacheError::Exhausted(e)) if (e.needed, e.free) == (1, 0)));
    run(&mut params, &[(1, 16)]);
    assert_eq!((lens(&params), params.num_free_pages()), (vec![(1, 16)], 0));
    // A full batch is exchanged whole, paged or not.
    for mut params in both() {
        run(&mut params, &[(0, 16), (1, 16), (2, 16), (3, 16)]);
        run(&mut params, &[(4, 16), (5, 16), (6, 16), (7, 16)]);
        assert_eq!(params.num_free_pages(), 0);
        check_table(&params);
    }
}

#[test]
fn reset_forgets_sequences_and_keeps_layers() {
    for mut params in both() {
        run(&mut params, &[(0, 5), (1, 3)]);
        pre_step(&mut params, &[(0, 1), (1, 1)]).unwrap(); // never written
        params.reset().unwrap();
        check(&params, &[], &[0; 4], &[0; 5], &[0; 5]);
        assert!(!params.allocate_memory(1).unwrap());
        assert!(write(&mut params, 1).is_err(), "no step is prepared");
        run(&mut params, &[(0, 4), (2, 2)]);
        check(&params, &[(0, 4), (2, 2)], &[0; 4], &[0, 4, 6, 6, 6], &[0, 4, 6, 6, 6]);
    }
}

#[test]
fn a_step_that_is_given_up_leaves_lengths() {
    for mut params in both() {
        run(&mut params, &[(0, 5), (1, 3)]);
        pre_step(&mut params, &[(0, 7), (2, 4)]).unwrap();
        params.roll_back();
        assert_eq!(lens(&params), [(0, 5), (2, 0)]);
        assert!(write(&mut params, 1).is_err());
        run(&mut params, &[(2, 4), (0, 1)]);
        check(&params, &[(2, 4), (0, 6)], &[0, 5, 0, 0], &[0, 4, 5, 5, 5], &[0, 4, 10, 10, 10]);
    }
}

#[test]
fn arrays_keep_their_addresses() {
    let addresses = |params: &Params| {
        let host = [
            params.cu_seqlens_q(),
            params.cu_seqlens_kv(),
            params.get_seqlens_pre_step(),
            params.page_table(),
        ];
        let device = [
            params.cu_seqlens_q_buffer(),
            params.cu_seqlens_kv_buffer(),
            params.seqlens_pre_step_buffer(),
            params.page_table_buffer(),
        ];
        (host.map(|a| (a.as_ptr(), a.len())), device.map(std::ptr::from_ref))
    };
    for mut params in both() {
        let before = addresses(&params);
        for step in [&[(0, 3)][..], &[(0, 1), (1, 9), (2, 2), (3, 16)], &[(3, 0)], &[]] {
            run(&mut params, step);
            assert_eq!(addresses(&params), before);
        }
        params.reset().unwrap();
        assert_eq!(addresses(&params), before);
    }
}

#[test]
fn a_step_says_where_the_cache_is() {
    let config = || config().head_dim_v(6);
    let modes = [config(), config().is_paged(true).page_size(2).total_num_pages(9)];
    for (mut params, is_paged) in modes.map(params).into_iter().zip([false, true]) {
        params.allocate_memory(1).unwrap();
        pre_step(&mut params, &[(0, 3), (1, 2)]).unwrap();
        let rows = vec![0.0_f32; 4 * 8 * 2 * 6];
        // Exact tensors, then tensors padded to fixed shapes.
        let forms: [(&str, &[u32], u32); 6] = [
            ("bshd", &[2, 3], 2),
            ("sbhd", &[3, 2], 2),
            ("thd", &[5], 4),
            ("bshd", &[4, 8], 4),
            ("sbhd", &[8, 4], 4),
            ("thd", &[32], 4),
        ];
        for (format, outer, batch) in forms {
            let view = |dim| TensorView::host(&rows, &[outer, &[2, dim]].concat());
            let output = params.step(1, view(4), view(6), format).unwrap();
            let [k, v] = [output.k.shape(), output.v.shape()];
            let outer = if is_paged { [9, 2] } else { [batch, 16] };
            assert_eq!(k, [outer[0], outer[1], 2, 4]);
            assert_eq!(v, [outer[0], outer[1], 2, 6]);
            assert_eq!(output.k.plane().layout().head_dim(), 4);
            assert_eq!(output.cu_seqlens_q, [0, 3, 5, 5, 5]);
            assert_eq!(output.cu_seqlens_kv, [0, 3, 5, 5, 5]);
            assert_eq!(output.max_sequence_length, 16);
            let name = if format == "bshd" { "bshd".into() } else { format!("{format}_2bshd") };
            assert_eq!(output.format.to_string(), name);
            assert_eq!(params.input_qkv_format().to_string(), format);
            assert_eq!(params.output_qkv_format().to_string(), name);
        }
    }
}

#[test]
fn rows_are_gathered_in_both_modes() {
    for mut params in both() {
        run(&mut params, &[(0, 3), (1, 16)]);
        let (mut k, mut v) = (vec![1.0_f32; 2 * 16 * 8], vec![1.0_f32; 2 * 16 * 8]);
        let view = |values| TensorViewMut::host(values, &[2, 16, 2, 4]);
        params.convert_paged_to_nonpaged(1, view(&mut k), view(&mut v)).unwrap();
        let short = |values| TensorViewMut::host(values, &[2, 15, 2, 4]);
        assert!(params.convert_paged_to_nonpaged(1, short(&mut k), short(&mut v)).is_err());
    }
}

#[test]
fn any_number_names_a_layer_and_memory_comes_once() {
    for mut params in both() {
        for layer in [0, 2, 1 << 40, usize::MAX] {
            assert!(params.allocate_memory(layer).unwrap());
            assert!(!params.allocate_memory(layer).unwrap());
        }
        pre_step(&mut params, &[(0, 3)]).unwrap();
        for layer in [usize::MAX, 1, 0, 1 << 40, 2] {
            write(&mut params, layer).unwrap();
        }
        // A layer may come when a step is open.
        assert!(params.allocate_memory(3).unwrap());
        write(&mut params, 3).unwrap();
        pre_step(&mut params, &[(0, 1)]).unwrap();
    }
}

#[test]
fn there_is_an_end_to_layers() {
    let mut params = params(config());
    assert!((0..65_535).all(|layer| params.allocate_memory(layer).unwrap()));
    let refused = super::refusal(params.allocate_memory(65_535));
    let got = kv_core::error::PlanError::TooMany { what: "layers", got: 65_536, max: 65_535 };
    assert_eq!(refused, got);
    assert!(!params.allocate_memory(65_534).unwrap());
}

#[test]
fn a_cache_without_layers_plans_all_the_same() {
    for config in [config(), paged(4, 16)] {
        let mut params = params(config);
        pre_step(&mut params, &[(0, 3)]).unwrap();
        pre_step(&mut params, &[(0, 1)]).unwrap();
        assert_eq!(lens(&params), [(0, 4)]);
    }
}

#[test]
fn long_prefix_sums_are_exact() {
    // A float32 cannot tell 16777217 from 16777216.
    let config =
        super::InferenceConfig::new(2, 16_777_217).num_heads_kv(1).head_dim_k(1).dtype(DType::F16);
    let mut params = params(config);
    pre_step(&mut params, &[(0, 16_777_217), (1, 1)]).unwrap();
    assert_eq!(params.cu_seqlens_q(), [0, 16_777_217, 16_777_218]);
    assert_eq!(params.cu_seqlens_kv(), [0, 16_777_217, 16_777_218]);
}

#[test]
fn ids_are_any_u64() {
    for mut params in both() {
        run(&mut params, &[(u64::MAX, 1), (0, 2), (1 << 33, 3)]);
        assert_eq!(lens(&params), [(u64::MAX, 1), (0, 2), (1 << 33, 3)]);
        assert_eq!(params.sequence_length(1 << 33), 3);
    }
}

/// A cache of two sequences, and the control of its device.
fn failing() -> (Params, NullControl) {
    let backend = NullBackend::new();
    let control = backend.control();
    let mut params = InferenceParams::new(backend, paged(4, 16)).unwrap();
    params.allocate_memory(1).unwrap();
    run(&mut params, &[(0, 5), (1, 3)]);
    (params, control)
}

#[test]
fn a_failing_device_leaves_a_state_to_go_on_from() {
    // The submission of the step before, the plans of this one, then each upload.
    for operation in 0..6 {
        let (mut params, control) = failing();
        control.fail_after(operation);
        let failed = pre_step(&mut params, &[(1, 1), (2, 9)]);
        assert!(matches!(failed, Err(CacheError::Device(_))), "operation {operation}: {failed:?}");
        assert_eq!(params.cu_seqlens_kv(), [0; 5]);
        assert!(write(&mut params, 1).is_err(), "no step is prepared");
        let lens_left: Vec<_> = params.sequences().iter().map(|row| row.len).collect();
        assert!(lens_left.iter().all(|len| *len <= 5), "{lens_left:?}");
        run(&mut params, &[(1, 1), (2, 9)]);
        check_table(&params);
        assert_eq!(lens(&params)[1], (2, 9));
        let before = state(&params);
        params.reset().unwrap();
        assert_eq!((before.free, params.num_free_pages()), (12, 16));
    }
}
