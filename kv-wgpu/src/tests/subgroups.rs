//! Subgroups are used only if the device passes the test for them.
use super::{find, name};
use crate::{WgpuBackend, WgpuOptions};

#[test]
fn subgroups_are_tested_only_if_allowed() {
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
        panic!("this driver is known to map neighbours of a workgroup to neighbours of a subgroup");
    }
}
