package overlay

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// Qdiscs returns the qdiscs of all devices by their index.
func Qdiscs() (map[int][]netlink.Qdisc, error) {
	all, err := netns.List(func() ([]netlink.Qdisc, error) { return netlink.QdiscList(nil) })
	if err != nil {
		return nil, fmt.Errorf("list the qdiscs: %w", err)
	}
	of := map[int][]netlink.Qdisc{}
	for _, q := range all {
		of[q.Attrs().LinkIndex] = append(of[q.Attrs().LinkIndex], q)
	}
	return of, nil
}

// QueueProblem names a qdisc or filter of a device whose work the cache would skip; "" if there is none. Devices of the
// path to containers have it both ways, the uplink only for incoming packets: outgoing ones meet its qdisc with the
// cache too.
func QueueProblem(l netlink.Link, qdiscs []netlink.Qdisc, egress bool) (string, error) {
	hooks := map[uint32]string{netlink.HANDLE_MIN_INGRESS: "ingress"}
	if egress {
		hooks[netlink.HANDLE_MIN_EGRESS] = "egress"
	}
	for _, q := range qdiscs {
		switch kind := q.Type(); kind {
		case "noqueue", "noop":
		case "clsact", "ingress":
			for parent, hook := range hooks {
				filters, err := netns.List(func() ([]netlink.Filter, error) { return netlink.FilterList(l, parent) })
				if errors.Is(err, unix.ENODEV) {
					return "", nil // the device is gone
				} else if err != nil {
					return "", fmt.Errorf("list the filters of %s: %w", l.Attrs().Name, err)
				}
				if len(filters) > 0 {
					return fmt.Sprintf("%s has a tc %s filter (%s)", l.Attrs().Name, hook, filters[0].Type()), nil
				}
			}
		default:
			if egress {
				return fmt.Sprintf("%s has a qdisc %s", l.Attrs().Name, kind), nil
			}
		}
	}
	return "", nil
}

// cachePrefix begins the names of the cache's programs.
const cachePrefix = "once_"

// foreign returns the name of a program that is not the cache's, or its number if it has no name.
func foreign(id ebpf.ProgramID) string {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return "" // it ended
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil || info.Name == "" {
		return fmt.Sprintf("number %d", id)
	}
	if strings.HasPrefix(info.Name, cachePrefix) {
		return ""
	}
	return info.Name
}

// ProgramProblem names a program that another process attached with tcx, where the cache would skip it.
func ProgramProblem(l netlink.Link, egress bool) (string, error) {
	hooks := map[ebpf.AttachType]string{ebpf.AttachTCXIngress: "ingress"}
	if egress {
		hooks[ebpf.AttachTCXEgress] = "egress"
	}
	for hook, name := range hooks {
		has, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: hook})
		if errors.Is(err, unix.ENODEV) {
			return "", nil // the device is gone
		} else if err != nil {
			return "", fmt.Errorf("list the tcx programs of %s: %w", l.Attrs().Name, err)
		}
		for _, p := range has.Programs {
			if what := foreign(p.ID); what != "" {
				return fmt.Sprintf("%s has a tcx %s program, %s, of another process", l.Attrs().Name, name, what), nil
			}
		}
	}
	return "", nil
}
