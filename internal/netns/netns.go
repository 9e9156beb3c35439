package netns

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// ErrNone means that a path is not a namespace, for example because the namespace is no longer mounted there.
var ErrNone = errors.New("not a namespace")

// Namespace is an open network namespace. The kernel keeps it alive until Close.
type Namespace struct {
	path string
	file *os.File
}

// Create creates a namespace with lo up, and mounts it at path, which must not exist. Create also creates a missing
// folder of path.
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

// Current opens the namespace of this process.
func Current() (*Namespace, error) { return Open("/proc/self/ns/net") }

// Remove unmounts a namespace of Create and removes its file. Processes and open handles in the namespace keep the
// namespace alive. A missing path is not an error.
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

// Path returns the path with which the namespace was opened.
func (n *Namespace) Path() string { return n.path }

// FD returns the file descriptor of the namespace; it is valid until Close.
func (n *Namespace) FD() int { return int(n.file.Fd()) }

func (n *Namespace) Close() error { return n.file.Close() }

// Inode returns the namespace's inode number, which is unique among the existing namespaces of the machine.
func (n *Namespace) Inode() (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(n.FD(), &st); err != nil {
		return 0, fmt.Errorf("namespace %s: %w", n.path, err)
	}
	return st.Ino, nil
}

// Do runs f on a thread in the namespace. Goroutines that f starts are not in the namespace. f must not call t.Fatal;
// it must return the error.
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

// Start starts a command in the namespace. The command's SysProcAttr must not set Pdeathsig, because the thread that
// starts the command ends at once.
func (n *Namespace) Start(cmd *exec.Cmd) error { return n.Do(cmd.Start) }

// Run runs a command in the namespace and waits for it.
func (n *Namespace) Run(cmd *exec.Cmd) error {
	if err := n.Start(cmd); err != nil {
		return err
	}
	return cmd.Wait()
}
