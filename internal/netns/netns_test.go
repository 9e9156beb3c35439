package netns_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

func create(t *testing.T, name string) *netns.Namespace {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	path := filepath.Join(t.TempDir(), name)
	n, err := netns.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		n.Close()
		if err := netns.Remove(path); err != nil {
			t.Error(err)
		}
	})
	return n
}

func threadNamespace() (string, error) { return os.Readlink("/proc/thread-self/ns/net") }

func TestDoIsInsideAndLeavesNoThreadBehind(t *testing.T) {
	n := create(t, "a")
	home, err := threadNamespace()
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			err := n.Do(func() error {
				inside, err := threadNamespace()
				if err == nil && inside == home {
					err = errors.New("still at home")
				}
				return err
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	// All remaining threads must be in the original namespace. Threads end asynchronously after Do.
	ino, err := n.Inode()
	if err != nil {
		t.Fatal(err)
	}
	foreign := fmt.Sprintf("net:[%d]", ino)
	for deadline := time.Now().Add(10 * time.Second); ; runtime.Gosched() {
		left := 0
		tasks, err := filepath.Glob("/proc/self/task/*/ns/net")
		if err != nil || len(tasks) == 0 {
			t.Fatalf("no tasks: %v", err)
		}
		for _, task := range tasks {
			if ns, err := os.Readlink(task); err == nil && ns == foreign {
				left++
			}
		}
		if left == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d threads are left in the namespace", left)
		}
	}
}

func TestDoSurvivesFunctionsThatDoNotReturn(t *testing.T) {
	n := create(t, "a")
	if err := n.Do(func() error { runtime.Goexit(); return nil }); err == nil {
		t.Error("Goexit was taken for success")
	}
	if err := n.Do(func() error { panic("boom") }); err == nil || !strings.Contains(err.Error(), "boom") {
		t.Errorf("panic came back as %v", err)
	}
}

func TestCreateRemove(t *testing.T) {
	n := create(t, "a")
	if _, err := netns.Create(n.Path()); !errors.Is(err, os.ErrExist) {
		t.Errorf("second Create: %v", err)
	}
	err := n.Do(func() error {
		lo, err := net.InterfaceByName("lo")
		if err == nil && lo.Flags&net.FlagUp == 0 {
			err = errors.New("lo is down")
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if err := netns.Remove(n.Path()); err != nil {
		t.Error(err)
	}
	if err := netns.Remove(n.Path()); err != nil {
		t.Errorf("removing twice: %v", err)
	}
	if _, err := os.Stat(n.Path()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("file is left: %v", err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), n.Path()) {
		t.Error("mount is left")
	}
}

func TestOpenRefusesOtherFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := netns.Open(path); err == nil {
		t.Error("a plain file was opened as a namespace")
	}
}

func TestNetlinkStaysInside(t *testing.T) {
	n := create(t, "a")
	h, err := n.Netlink()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "inside0"}, PeerName: "inside1"}
	if err := netns.Retry(func() error { return h.LinkAdd(veth) }); err != nil {
		t.Fatal(err)
	}
	links, err := netns.List(h.LinkList)
	if err != nil || len(links) != 3 {
		t.Errorf("links inside: %v, %v", links, err)
	}
	if _, err := net.InterfaceByName("inside0"); err == nil {
		t.Error("the link was made outside")
	}
}

func TestRunCommand(t *testing.T) {
	n := create(t, "a")
	var out strings.Builder
	cmd := exec.Command("readlink", "/proc/self/ns/net")
	cmd.Stdout = &out
	if err := n.Run(cmd); err != nil {
		t.Fatal(err)
	}
	ino, err := n.Inode()
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("net:[%d]\n", ino); out.String() != want {
		t.Errorf("command ran in %q, want %q", out.String(), want)
	}
}

func TestListRepeatsAnInterruptedDump(t *testing.T) {
	for _, c := range []struct {
		name      string
		failures  int
		err, want error
	}{
		{"at once", 0, nil, nil},
		{"third time", 2, netlink.ErrDumpInterrupted, nil},
		{"never", 1 << 20, netlink.ErrDumpInterrupted, unix.EINTR},
		{"other error", 1, unix.EPERM, unix.EPERM},
	} {
		t.Run(c.name, func(t *testing.T) {
			calls := 0
			list, err := netns.List(func() ([]int, error) {
				calls++
				if calls <= c.failures {
					return nil, c.err
				}
				return []int{7}, nil
			})
			if !errors.Is(err, c.want) || (c.want == nil && (err != nil || len(list) != 1)) {
				t.Errorf("%v, %v after %d calls", list, err, calls)
			}
		})
	}
}

func TestWaitUp(t *testing.T) {
	n := create(t, "a")
	h, err := n.Netlink()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if err := h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "v0"}, PeerName: "v1"}); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := n.WaitUp(short, "v0"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a link that is down: %v", err)
	}
	for _, name := range []string{"v0", "v1"} {
		link, err := h.LinkByName(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := h.LinkSetUp(link); err != nil {
			t.Fatal(err)
		}
	}
	long, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := n.WaitUp(long, "v0"); err != nil {
		t.Error(err)
	}
}
