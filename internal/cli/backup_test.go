package cli

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/orchestrator"
)

func TestOrchestratorBackupRestore(t *testing.T) {
	dir := t.TempDir()
	data, file, other := filepath.Join(dir, "data"), filepath.Join(dir, "file"), filepath.Join(dir, "other")
	refused(t, ExitFailed, "holds no orchestrator's store", "orchestrator", "backup", file, "--data-dir", data)
	s, err := orchestrator.Start(
		t.Context(),
		orchestrator.Config{DataDir: data, RunDir: dir, Listen: "[::1]:0", Log: slog.New(slog.DiscardHandler)},
	)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)

	t.Setenv("PILASTER_ORCHESTRATOR_SOCKET", orchestrator.Socket(dir))
	command(t, "tenant", "create", "blue")
	if code, _, err := run(t, webPolicy+"---\n"+basePolicy, "policy", "apply", "-f", "-", "--tenant",
		"blue"); code != ExitDone {
		t.Fatal(err)
	}
	made := ask[backupView](t, "orchestrator", "backup", file, "--data-dir", data)
	if made.File != file || made.DataDir != data || made.Records == 0 || made.Cluster == "" || made.Revision == 0 ||
		made.Skip != nil {
		t.Errorf("backup: %+v, want file, data directory, cluster, records and revision, and no skip", made)
	}
	refused(t, ExitFailed, "exists already", "orchestrator", "backup", file, "--data-dir", data)
	refused(t, ExitUsage, "", "orchestrator", "backup", "--data-dir", data)
	refused(t, ExitUsage, "etcdctl snapshot save", "orchestrator", "backup", file+"2", "--etcd", "https://a:2379")
	if r := command(t, "orchestrator", "backup", file+"2", "--data-dir", data); r.code != ExitDone ||
		!strings.Contains(r.stdout, made.Cluster) ||
		!strings.Contains(r.stdout, "keep it secret") {
		t.Errorf("backup: %+v, want the cluster and a warning about secrets", r)
	}

	refused(t, ExitUsage, "data-dir", "orchestrator", "restore", file)
	refused(
		t,
		ExitUsage,
		"etcdutl snapshot restore",
		"orchestrator",
		"restore",
		file,
		"--data-dir",
		other,
		"--etcd",
		"https://a:2379",
	)
	refused(t, ExitFailed, "is not empty", "orchestrator", "restore", file, "--data-dir", data)
	refused(t, ExitFailed, "no such file", "orchestrator", "restore", file+"3", "--data-dir", other)
	back := ask[backupView](t, "orchestrator", "restore", file, "--data-dir", other, "--skip", "7")
	if back.Skip == nil || *back.Skip != 7 || !slices.Equal(back.Ruled, []string{"blue"}) ||
		back.Cluster != made.Cluster ||
		back.DataDir != other ||
		!back.Made.Equal(made.Made) {
		t.Errorf("restore: %+v, want skip 7, policies of blue, and the rest as in the backup %+v", back, made)
	}
	if err := os.RemoveAll(other); err != nil {
		t.Fatal(err)
	}
	if r := command(t, "orchestrator", "restore", file, "--data-dir", other); r.code != ExitDone ||
		!strings.Contains(r.stdout, "The next 1024 node prefixes") ||
		!strings.Contains(r.stdout, "Policies are those of the backup (tenants blue)") ||
		!strings.Contains(r.stdout, " from the backup of "+moment(made.Made)+":") {
		t.Errorf("restore: %+v, want the skipped numbers, the policies and the time of the backup", r)
	}
	for _, sub := range []string{"backup", "restore"} {
		if r := command(t, "__complete", "orchestrator", sub, "x", "--"); !strings.Contains(r.stdout, "--data-dir") ||
			strings.Contains(r.stdout, "--etcd") {
			t.Errorf("%s -- <TAB>: %q, want --data-dir and not --etcd", sub, r.stdout)
		}
		if r := command(t, "orchestrator", sub, "--help"); !strings.Contains(r.stdout, "Examples:") {
			t.Errorf("%s --help: %s, want examples", sub, r.stdout)
		}
	}
}
