package api

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/agent/refusal"
)

// callerKey is the context key of the caller's process id.
type callerKey struct{}

// WithPeer adds the caller's process id, from SO_PEERCRED, to a connection's context.
func WithPeer(ctx context.Context, c net.Conn) context.Context {
	unixConn, ok := c.(*net.UnixConn)
	if !ok {
		return ctx
	}
	raw, err := unixConn.SyscallConn()
	if err != nil {
		return ctx
	}
	var cred *unix.Ucred
	if ctlErr := raw.Control(func(fd uintptr) {
		cred,
			err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); ctlErr != nil ||
		err != nil {
		return ctx
	}
	return context.WithValue(ctx, callerKey{}, int(cred.Pid))
}

// openNetns opens a network namespace at a path as the calling process sees it: a runtime may have mounted it where
// this process does not see it. While the file is open, the namespace can be entered by "/proc/self/fd/N", even after
// the caller has exited.
func openNetns(ctx context.Context, path string) (*os.File, error) {
	if !filepath.IsAbs(path) {
		return nil, refusal.New(refusal.ErrInvalid, "netns %q is not an absolute path", path)
	}
	f, err := openAsPeer(ctx, path)
	if err != nil {
		var own error
		if f, own = os.Open(path); own != nil {
			return nil, refusal.New(refusal.ErrInvalid, "opening netns %s: %w", path, errors.Join(err, own))
		}
	}
	if err := checkNetns(f); err != nil {
		f.Close()
		return nil, refusal.New(refusal.ErrInvalid, "netns %s: %w", path, err)
	}
	return f, nil
}

var errNoPeer = errors.New("the caller's process is unknown")

func openAsPeer(ctx context.Context, path string) (*os.File, error) {
	pid, ok := ctx.Value(callerKey{}).(int)
	if !ok || pid == 0 {
		return nil, errNoPeer
	}
	root := filepath.Join("/proc", strconv.Itoa(pid), "root")
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", root, err)
	}
	defer unix.Close(dir)
	// Symbolic links such as /var/run must resolve to the caller's /run, not to ours.
	fd, err := unix.Openat2(
		dir,
		path,
		&unix.OpenHow{Flags: unix.O_RDONLY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT},
	)
	if err == nil {
		return os.NewFile(uintptr(fd), path), nil
	}
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.EXDEV) {
		// /proc/<pid>/ns/net is a link that cannot be followed below a root.
		return os.Open(root + path)
	}
	return nil, fmt.Errorf("as process %d sees it: %w", pid, err)
}

// checkNetns refuses files that are not network namespaces, and the node's own namespace.
func checkNetns(f *os.File) error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil {
		return err
	}
	if fs.Type != unix.NSFS_MAGIC {
		return errors.New("it is not a namespace")
	}
	if kind, err := unix.IoctlRetInt(int(f.Fd()), unix.NS_GET_NSTYPE); err != nil || kind != unix.CLONE_NEWNET {
		return errors.New("it is a namespace, but not a network namespace")
	}
	var there, here unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &there); err != nil {
		return err
	}
	if err := unix.Stat("/proc/self/ns/net", &here); err != nil {
		return err
	}
	if there.Dev == here.Dev && there.Ino == here.Ino {
		return errors.New("it is the node's own namespace; a container needs its own")
	}
	return nil
}
