//! Tasks that wait without a thread of their own.
use std::future::poll_fn;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use kv_core::backend::Fence;

use super::*;

#[test]
fn a_task_is_woken_when_work_is_done() {
    let Some(backend) = open() else { return };
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let mut queue = backend.queue().unwrap();
        let buffer = backend.alloc(1 << 22).unwrap();
        for round in 1..=4_u8 {
            // Shaders, so that the device is still busy when it is asked.
            queue.zero(&buffer, 1, (1 << 22) - 2).unwrap();
            queue.upload(&buffer, 5, &[round; 3]).unwrap();
            let fence = queue.submit().unwrap();
            // Sleeps until it is woken; nobody else polls the device.
            pollster::block_on(poll_fn(|cx| fence.poll(cx))).unwrap();
            fence.wait().unwrap();
            let mut readback = queue.download(&buffer, 4, 5).unwrap();
            let bytes = pollster::block_on(poll_fn(|cx| readback.poll(cx))).unwrap();
            assert_eq!(bytes, [0, round, round, round, 0]);
        }
        sender.send(()).unwrap();
    });
    receiver.recv_timeout(Duration::from_mins(2)).expect("the task sleeps, or has failed");
}
