// Package ops_test checks operations on nodes against the machine's own view: iproute2, the mount table and folders.
package ops_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"pilaster.io/pilaster/internal/netns"
)

// machine is the output of other tools about everything that an agent could leave behind on its node.
type machine map[string]string

// look reads a node's namespace, and the folders that its agent writes to.
func look(ctx context.Context, t *testing.T, ns *netns.Namespace, folders ...string) machine {
	t.Helper()
	m := machine{}
	for _, command := range []string{
		"ip -d link", "ip -d addr", "ip -4 route show table all", "ip -6 route show table all", "ip -4 rule",
		"ip -6 rule", "tc qdisc", "ip -6 netconf",
	} {
		m[command] = say(ctx, t, ns, command)
	}
	must(t, ns.Do(m.addPrograms))
	must(t, ns.Do(func() error { return m.addFiles("/proc/sys/net/ipv6/conf", true) }))
	must(t, ns.Do(func() error { return m.addFiles("/proc/sys/net/core", true) }))
	for _, folder := range folders {
		must(t, m.addFiles(folder, false))
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	for line := range strings.Lines(string(mounts)) {
		for _, folder := range folders {
			if strings.Contains(line, " "+folder) {
				m["mount "+line] = ""
			}
		}
	}
	return m
}

// age matches parts that change by themselves.
var age = regexp.MustCompile(`expires \S+sec|_lft \d+sec|linkinfo \S+`)

func say(ctx context.Context, t *testing.T, ns *netns.Namespace, command string) string {
	t.Helper()
	var out bytes.Buffer
	args := strings.Fields(command)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := ns.Run(cmd); err != nil {
		t.Fatalf("%s: %v\n%s", command, err, &out)
	}
	return age.ReplaceAllString(out.String(), "")
}

func (m machine) addPrograms() error {
	devices, err := net.Interfaces()
	if err != nil {
		return err
	}
	for _, device := range devices {
		for _, hook := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
			r, err := link.QueryPrograms(link.QueryOptions{Target: device.Index, Attach: hook})
			if err != nil {
				return err
			}
			m[fmt.Sprintf("programs at %v of %s", hook, device.Name)] = fmt.Sprint(len(r.Programs))
		}
	}
	return nil
}

// addFiles lists a tree, optionally with the contents of files.
func (m machine) addFiles(root string, content bool) error {
	return filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		m["path "+path] = e.Type().String()
		if !content || e.IsDir() {
			return nil
		}
		// Some sysctls are write-only, and reading others returns an error.
		b, err := os.ReadFile(path)
		m["path "+path] = fmt.Sprint(string(b), err)
		return nil
	})
}

// differences lists the differences to another state of the machine.
func (m machine) differences(other machine) []string {
	var all []string
	for key, was := range m {
		if is, there := other[key]; !there {
			all = append(all, "gone: "+key)
		} else if is != was {
			all = append(all, fmt.Sprintf("changed: %s\nwas\n%s\nis\n%s", key, was, is))
		}
	}
	for key := range other {
		if _, there := m[key]; !there {
			all = append(all, "new: "+key)
		}
	}
	return all
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
