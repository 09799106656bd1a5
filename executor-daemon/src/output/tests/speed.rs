//! How fast bytes are moved. A measurement: it runs when it is asked for.

use super::*;

/// The numbers that docs/adr/0003-moving-bytes.md gives: `cargo test --release -p executor-daemon --lib -- --ignored --nocapture speed`.
#[ignore = "a measurement, of some seconds"]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn speed_over_cat() {
    const DD: &str = "dd if=/dev/zero bs=64k count=16384 status=none";
    #[expect(clippy::disallowed_methods, reason = "programs to be compared with")]
    fn timed(program: &str, arguments: &[&str], stdout: Stdio) -> (Child, Instant) {
        let before = Instant::now();
        (Command::new(program).args(arguments).stdin(Stdio::null()).stdout(stdout).spawn().unwrap(), before)
    }
    let mut ratios = [Vec::new(), Vec::new()];
    for _ in 0..11 {
        let (mut cat, before) = timed("bash", &["-c", &format!("{DD} | cat >/dev/null")], Stdio::null());
        assert!(cat.wait().unwrap().success());
        let cat = before.elapsed();

        for (opener, ratios) in [spill_in_dir(), Opener::Rings(TempDir::new().unwrap())].into_iter().zip(&mut ratios) {
            let (stream, pipe, _files) = start(opener, TAIL, 0);
            let (mut dd, before) = timed("bash", &["-c", DD], pipe.into());
            // As an engine does: who watched the progress would be woken at every step.
            assert!(tokio::task::spawn_blocking(move || dd.wait()).await.unwrap().unwrap().success());
            closed(&stream).await;
            let ours = before.elapsed();
            assert_eq!(stream.total(), 1024 * MIB);
            ratios.push(ours.as_secs_f64() / cat.as_secs_f64());
            println!("cat {cat:?}, stream {ours:?}");
        }
    }
    for (ring, ratios) in ["memory", "a file"].into_iter().zip(&mut ratios) {
        ratios.sort_by(f64::total_cmp);
        println!("ring in {ring}: median of the time over cat's: {:.2}", ratios[ratios.len() / 2]);
    }
}
