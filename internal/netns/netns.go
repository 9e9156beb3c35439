package netns

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// ErrNone is of a path that leads to something else than a namespace, such as where one was mounted.
var ErrNone = errors.New("not a namespace")

// Namespace is an open network namespace. The kernel keeps it alive until Close.
type Namespace struct {
	path string
	file *os.File
}

// Create makes a namespace with lo up and binds it to path, which must not exist. The folder is
// made when missing.
func Create(path string) (*Namespace, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("make namespace: %w", err)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return nil, fmt.Errorf("make namespace: %w", err)
	}
	f.Close()
	err = onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		if err := unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind: %w", err)
		}
		return setLoopbackUp()
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make namespace %s: %w", path, err), Remove(path))
	}
	return Open(path)
}

// Open opens the namespace at path: a bind mount, or /proc/<pid>/ns/net.
func Open(path string) (*Namespace, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open namespace: %w", err)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil || fs.Type != unix.NSFS_MAGIC {
		f.Close()
		return nil, fmt.Errorf("open namespace: %s is %w", path, ErrNone)
	}
	return &Namespace{path, f}, nil
}

// Current opens the namespace this process runs in.
func Current() (*Namespace, error) { return Open("/proc/self/ns/net") }

// Remove unbinds a namespace made by Create and removes its file. Processes and open handles
// inside keep the namespace itself alive. A missing path is no error.
func Remove(path string) error {
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) &&
		!errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove namespace %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove namespace: %w", err)
	}
	return nil
}

// Path is where the namespace was opened.
func (n *Namespace) Path() string { return n.path }

// FD is the open namespace, for interfaces that take a descriptor; valid until Close.
func (n *Namespace) FD() int { return int(n.file.Fd()) }

func (n *Namespace) Close() error { return n.file.Close() }

// Inode tells namespaces apart: it is unique among the living ones of a machine.
func (n *Namespace) Inode() (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(n.FD(), &st); err != nil {
		return 0, fmt.Errorf("namespace %s: %w", n.path, err)
	}
	return st.Ino, nil
}

// Do runs f on a thread inside the namespace. Goroutines that f starts are outside again. Do not
// call t.Fatal in f: return the error.
func (n *Namespace) Do(f func() error) error {
	return onThread(func() error {
		if err := n.enter(); err != nil {
			return err
		}
		return f()
	})
}

func (n *Namespace) enter() error {
	if err := unix.Setns(n.FD(), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter namespace %s: %w", n.path, err)
	}
	return nil
}

// Start starts a command inside the namespace. Its SysProcAttr must not ask for Pdeathsig: the
// thread that starts the command ends at once.
func (n *Namespace) Start(cmd *exec.Cmd) error { return n.Do(cmd.Start) }

// Run runs a command inside the namespace and waits for it.
func (n *Namespace) Run(cmd *exec.Cmd) error {
	if err := n.Start(cmd); err != nil {
		return err
	}
	return cmd.Wait()
}
