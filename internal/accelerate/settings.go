package accelerate

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/statefile"
)

// Settings of conntrack in the network namespace of the calling thread.
const (
	sysctls     = "/proc/sys/"
	liberal     = "net/netfilter/nf_conntrack_tcp_be_liberal"
	udpTimeout  = "net/netfilter/nf_conntrack_udp_timeout"
	connections = "net/netfilter/nf_conntrack_count"
)

// readSetting returns "" if the kernel has no such setting, as without conntrack.
func readSetting(name string) (string, error) {
	b, err := os.ReadFile(filepath.Join(sysctls, name))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return strings.TrimSpace(string(b)), err
}

func writeSetting(name, value string) error {
	return os.WriteFile(filepath.Join(sysctls, name), []byte(value), 0o644)
}

// Setting is a setting of the kernel that the daemon changed.
type Setting struct {
	Name   string `json:"name"`
	Before string `json:"before"`
	Value  string `json:"value"`
}

const recordVersion = 1

// record is the file with the changed settings. It exists before the first one is changed.
type record struct {
	Version   int       `json:"version"`
	Namespace string    `json:"namespace"` // network namespace, as in /proc/PID/ns/net
	Settings  []Setting `json:"settings"`
}

// readRecord returns an empty record if there is none, and an error if it is of another network namespace than the
// calling thread's.
func readRecord(path string) (record, error) {
	own, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		return record{}, err
	}
	r := record{Version: recordVersion, Namespace: own}
	err = statefile.Read(path, recordVersion, &r)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return r, nil
	case err == nil && r.Namespace != own:
		err = fmt.Errorf("%s has settings of another network namespace, %s\n  nothing was changed; run `pilaster "+
			"accelerate reset` there, or delete the file if that namespace is gone", path, r.Namespace)
	}
	return r, err
}

// change sets a setting and records its value before, so that restore can undo it after a crash too.
func change(path, name, value string) error {
	before, err := readSetting(name)
	if err != nil || before == "" || before == value {
		return err
	}
	r, err := readRecord(path)
	if err != nil {
		return err
	}
	known := false
	for _, s := range r.Settings {
		known = known || s.Name == name
	}
	if !known {
		r.Settings = append(r.Settings, Setting{Name: name, Before: before, Value: value})
		if err := statefile.Write(path, r, 0o600); err != nil {
			return fmt.Errorf("record %s: %w; it was not changed", name, err)
		}
	}
	if err := writeSetting(name, value); err != nil {
		return fmt.Errorf("set %s to %s: %w", name, value, err)
	}
	return nil
}

// restore undoes the recorded changes, except of settings that another program has changed since, and
// removes the record. It returns what it undid.
func restore(path string) (undone []Setting, err error) {
	r, err := readRecord(path)
	if err != nil {
		return nil, err
	}
	for _, s := range r.Settings {
		now, err := readSetting(s.Name)
		if err != nil {
			return undone, err
		}
		if now != s.Value {
			continue
		}
		if s.Name == liberal {
			if err := keepConnections(); err != nil {
				return undone, fmt.Errorf("%w; %s is still %s", err, s.Name, s.Value)
			}
		}
		if err := writeSetting(s.Name, s.Before); err != nil {
			return undone, fmt.Errorf("set %s to %s again: %w", s.Name, s.Before, err)
		}
		undone = append(undone, s)
	}
	if err := statefile.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return undone, err
	}
	return undone, nil
}

// validity returns how long entries may be valid: conntrack must see a packet of a flow before its entry expires.
func validity() (time.Duration, error) {
	text, err := readSetting(udpTimeout)
	if err != nil || text == "" {
		return MaxValidity, err
	}
	seconds, err := strconv.Atoi(text)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", udpTimeout, err)
	}
	return min(MaxValidity, time.Duration(seconds)*time.Second/3), nil
}

// tracked reports whether the namespace has conntrack entries.
func tracked() (bool, error) {
	n, err := readSetting(connections)
	return n != "" && n != "0", err
}
