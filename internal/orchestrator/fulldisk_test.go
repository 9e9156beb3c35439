package orchestrator

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// If the disk fills up, the orchestrator reports that and exits. When there is room again, it starts with every tenant
// that it has acknowledged.
func TestFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	t.Parallel()
	c := testConfig(t)
	disk := t.TempDir()
	if err := unix.Mount("tmpfs", disk, "tmpfs", 0, "size=200m"); err != nil { // etcd allocates 64 MB at a time
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(disk, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	c.DataDir, c.Log = filepath.Join(disk, "data"), nil
	text, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	ready, notify := notifySocket(t)
	var stderr bytes.Buffer
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), asProcess+"="+string(text), "NOTIFY_SOCKET="+notify)
	cmd.Stderr = &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { defer close(ended); err = cmd.Wait() }()
	t.Cleanup(func() { cmd.Process.Kill(); <-ended })
	ready()

	op, acknowledged := operator(c.RunDir), []string{"first"}
	create := func(name string) error {
		_, err := op.CreateTenant(t.Context(), connect.NewRequest(&pilasterv1.CreateTenantRequest{Name: name}))
		return err
	}
	if err := create("first"); err != nil {
		t.Fatal(err)
	}
	junk := filepath.Join(disk, "junk")
	if f, full := os.Create(junk); full == nil {
		for full == nil {
			_, full = f.Write(make([]byte, 1<<20))
		}
		f.Close()
	}
	for i := 0; ; i++ {
		name := fmt.Sprint("t", i)
		if err := create(name); err != nil {
			if !errors.Is(err, io.ErrUnexpectedEOF) { // it exited while it sent the response
				wantCode(t, err, connect.CodeUnavailable)
			}
			break
		}
		acknowledged = append(acknowledged, name)
	}
	<-ended
	if err == nil || !strings.Contains(stderr.String(), "no space left on device") ||
		!strings.Contains(stderr.String(), "repair what etcd reported, and restart") {
		t.Errorf("the process exited with %v and logged\n%s", err, stderr.String())
	}

	if err := os.Remove(junk); err != nil {
		t.Fatal(err)
	}
	c.Log = testConfig(t).Log
	s := start(t, c)
	for _, name := range acknowledged {
		if tenant, _, _ := s.cache.Tenant(name); tenant == nil {
			t.Errorf("tenant %s is lost, one of %d that were acknowledged", name, len(acknowledged))
		}
	}
	createTenant(t, s, "after")
}
