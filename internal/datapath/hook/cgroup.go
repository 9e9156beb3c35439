package hook

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/datapath/host"
)

// cgroupPins are the pins of the programs for sockets.
var cgroupPins = []string{"connect6", "getpeername6", "sendmsg6", "recvmsg6"}

// AttachSockets attaches the programs that give sockets of a cgroup a backend when they connect to a service, or
// replaces those of an earlier process. Without a cgroup it detaches them: then packets of containers are translated,
// and processes of the node reach no services. The links are pinned.
func (d *Hooks) AttachSockets(root string) error {
	if root == "" {
		for _, pin := range cgroupPins {
			if err := d.detachPin(pin); err != nil {
				return fmt.Errorf("detach %s: %w", pin, err)
			}
		}
		return nil
	}
	if err := host.CheckCgroup(root); err != nil {
		return err
	}
	for _, h := range []struct {
		pin     string
		attach  ebpf.AttachType
		program *ebpf.Program
	}{
		{cgroupPins[0], ebpf.AttachCGroupInet6Connect, d.Objects.PilConnect6},
		{cgroupPins[1], ebpf.AttachCgroupInet6GetPeername, d.Objects.PilGetpeername6},
		{cgroupPins[2], ebpf.AttachCGroupUDP6Sendmsg, d.Objects.PilSendmsg6},
		{cgroupPins[3], ebpf.AttachCGroupUDP6Recvmsg, d.Objects.PilRecvmsg6},
	} {
		if err := d.attachSocket(root, filepath.Join(d.LinksDir(), h.pin), h.attach, h.program); err != nil {
			return fmt.Errorf("attach %s to cgroup %s: %w", h.pin, root, err)
		}
	}
	return nil
}

func (d *Hooks) attachSocket(root, pin string, attach ebpf.AttachType, program *ebpf.Program) error {
	switch old, err := link.LoadPinnedLink(pin, nil); {
	case err == nil:
		defer old.Close()
		if isOfCgroup(old, root) {
			return old.Update(program)
		}
		if err := DetachLink(pin); err != nil {
			return err
		}
	case !errors.Is(err, os.ErrNotExist):
		return err
	}
	l, err := link.AttachCgroup(link.CgroupOptions{Path: root, Attach: attach, Program: program})
	if errors.Is(err, syscall.E2BIG) {
		return fmt.Errorf("%w: a cgroup has at most 64 programs of a kind; give this node a cgroup of its own", err)
	}
	if err != nil {
		return err
	}
	defer l.Close()
	return l.Pin(pin)
}

// isOfCgroup reports whether a link is still attached to a cgroup. The id of a cgroup is the inode of its folder.
func isOfCgroup(l link.Link, root string) bool {
	info, err := l.Info()
	if err != nil || info.Cgroup() == nil {
		return false
	}
	var s unix.Stat_t
	return unix.Stat(root, &s) == nil && s.Ino == info.Cgroup().CgroupId
}
