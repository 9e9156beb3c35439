package api

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/refusal"
)

func sameFile(a, b string) (bool, error) {
	x, err := os.Stat(a)
	if err != nil {
		return false, err
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y), err
}

func TestAddRefusesWhatIsNoContainersNamespace(t *testing.T) {
	b := newServiceBed(t)
	b.service.Serve(b.Core, nil)
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"/proc/self/ns/net":  "node's own",
		"/proc/self/ns/uts":  "not a network namespace",
		file:                 "not a namespace",
		file + "-not-there":  "opening netns",
		"run/netns/relative": "absolute",
		"":                   "absolute",
	} {
		_, err := b.client.AddEndpoint(t.Context(), connect.NewRequest(&pilasterv1.AddEndpointRequest{
			ContainerId: "c1", Interface: "eth0", Netns: path, Tenant: "blue",
		}))
		if connect.CodeOf(err) != connect.CodeInvalidArgument || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", path, err, want)
		}
	}
	b.CheckClean()
}

// The path of a namespace exists only in the mount namespace of the runtime.
func TestNetnsIsOpenedAsTheCallerSeesIt(t *testing.T) {
	real := agenttest.MakeNetns(t)
	dir := t.TempDir()
	// The child mounts the namespace where this process sees an empty folder; /there leads to it
	// by a link, as /var/run does.
	script := `mount -t tmpfs none "$1" && mkdir "$1/run" && touch "$1/run/c1" && ` +
		`mount --bind "$2" "$1/run/c1" && ln -s "$1/run" "$1/there" && echo ready && read _`
	child := exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", dir, real)
	in, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	child.Stderr = os.Stderr
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { in.Close(); child.Wait() }()
	if _, err := io.ReadFull(out, make([]byte, len("ready\n"))); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "run")); err == nil {
		t.Fatal("this process sees the caller's mount")
	}
	caller := context.WithValue(t.Context(), callerKey{}, child.Process.Pid)
	for _, path := range []string{"run/c1", "there/c1"} {
		f, err := openNetns(caller, filepath.Join(dir, path))
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		if same, err := sameFile(fdPath(f), real); err != nil || !same {
			t.Errorf("%s: another namespace was opened, %v", path, err)
		}
		f.Close()
	}
	// Links of /proc, which openat2 does not follow below a root.
	f, err := openNetns(caller, "/proc/self/ns/net")
	if err == nil {
		f.Close()
	}
	if !errors.Is(err, refusal.ErrInvalid) || !strings.Contains(err.Error(), "node's own") {
		t.Errorf("the caller's own namespace, which is the node's: %v", err)
	}
	if _, err := openNetns(caller, filepath.Join(dir, "run/c2")); !errors.Is(err, refusal.ErrInvalid) {
		t.Errorf("a path that is nowhere: %v", err)
	}
}
