//! Subgroups are used only where they are found to be as shaders need them.
use super::{find, name};
use crate::{WgpuBackend, WgpuOptions};

#[test]
fn neighbours_are_looked_for_only_where_that_is_allowed() {
    let Some(adapter) = find() else { return };
    let open = |subgroups| {
        let options = WgpuOptions::new(name()).with_subgroups(subgroups);
        WgpuBackend::open(&options).unwrap()
    };
    assert!(!open(false).shared.has_neighbours().unwrap());
    let found = open(true).shared.has_neighbours().unwrap();
    let info = adapter.get_info();
    if found {
        assert!(adapter.features().contains(wgpu::Features::SUBGROUP));
        assert!(info.subgroup_min_size >= 8, "{info:?}");
    } else if info.name.contains("llvmpipe") && info.subgroup_min_size >= 8 {
        panic!("this driver is known to cut workgroups into subgroups in their order");
    }
}
