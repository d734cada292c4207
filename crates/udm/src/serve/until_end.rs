//! What a server does until its end: it runs all that goes on beside its clients, and ends by a
//! signal, with the command of `--run`, with its only client, or when another process takes over.

use super::args::ServeArgs;
use super::child::RunCommandProcess;
use super::metrics_port::MetricsPort;
use super::one_client::single_client_left;
use super::shutdown::SignalReceiver;
use super::sockets::ServerSockets;
use super::upgrade::{RunningServer, UpgradeRequests, serve_upgrade_requests};
use super::{PAUSE, reload, systemd};
use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use std::process::ExitCode;
use std::sync::Arc;
use udm_control::exports::DeviceExporter;
use udm_control::{http, verbs};
use udm_runtime::Runtime;

/// Serves until the end. Also returns true if another process serves now.
pub(super) async fn run_until_end(
    running: RunningServer<'_>,
    metrics_port: MetricsPort,
    has_file: bool,
    cores: &Runtime,
    sockets: &ServerSockets,
    signals: &mut SignalReceiver,
) -> (Result<ExitCode>, bool) {
    let (registry, args) = (running.registry, running.args);
    let exporter = registry.exporter().expect("set before");
    let hangups = signals.hangups();
    let listening = http::server::serve_control_socket(running.control, http::router(Arc::clone(registry)));
    let mut upgrade = std::pin::pin!(serve_upgrade_requests(UpgradeRequests::of(registry), running));
    let end = async {
        tokio::select! {
            never = verbs::run_deferred_removals(registry) => match never {},
            never = reload::reload_on_sighup(&hangups, registry, has_file, running.tls) => match never {},
            never = reload::create_waiting_devices(registry) => match never {},
            never = http::finish_resumed_merges(registry) => match never {},
            never = http::drive_moves(registry) => match never {},
            never = http::retry_waiting_clones(registry) => match never {},
            never = http::finish_hydrated_clones(registry), if args.clone_finish => match never {},
            never = metrics_port.serve(registry) => match never {},
            broken = listening => broken.context("control socket").map(|()| ExitCode::SUCCESS),
            never = systemd::send_systemd_keepalives(cores.core_set()) => match never {},
            () = running.machines.connection_ended() => Ok(ExitCode::SUCCESS),
            () = single_client_left(args, running.server) => Ok(ExitCode::SUCCESS),
            done = run_command_or_wait_signal(args, sockets, exporter, signals) => done,
        }
    };
    let mut successor = None;
    let done = tokio::select! {
        done = end => done,
        pid = &mut upgrade => {
            // The client of the control socket gets its reply.
            tokio::time::sleep(PAUSE).await;
            successor = Some(pid);
            Ok(ExitCode::SUCCESS)
        }
    };
    if successor.is_none() && registry.is_ending() {
        // A signal during an upgrade is for whoever serves afterwards.
        let given_up = async {
            while registry.is_ending() {
                tokio::time::sleep(PAUSE).await;
            }
        };
        tokio::select! {
            pid = upgrade => successor = Some(pid),
            () = given_up => {}
        }
        if let Some(pid) = successor.and_then(|pid| Pid::from_raw(pid.cast_signed())) {
            let _ = kill_process(pid, Signal::TERM);
        }
    }
    (done, successor.is_some())
}

/// Runs the command of `--run`, or waits for a signal.
async fn run_command_or_wait_signal(
    args: &ServeArgs,
    sockets: &ServerSockets,
    exporter: &DeviceExporter,
    signals: &mut SignalReceiver,
) -> Result<ExitCode> {
    match &args.run {
        None => {
            signals.next().await;
            Ok(ExitCode::SUCCESS)
        }
        Some(command) => {
            let mut child = RunCommandProcess::start(command, sockets, exporter).context("serve: --run")?;
            child.finish(signals).await.context("serve: --run")
        }
    }
}
