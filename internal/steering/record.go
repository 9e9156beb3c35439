package steering

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/statefile"
)

const recordVersion = 1

// record has the steering that was set, and what was set before.
type record struct {
	Version int      `json:"version"`
	Devices []*entry `json:"devices"`
}

// entry is a device whose steering was set. Keys of Before and Set are files such as rx-0/rps_cpus.
type entry struct {
	Device
	Inode  uint64            `json:"netnsInode"`
	Index  int               `json:"ifindex"`
	Mode   string            `json:"mode"`
	Reason string            `json:"reason,omitempty"` // of auto
	Before map[string]string `json:"before"`
	Set    map[string]string `json:"set"`
}

// Steering is the steering of a machine.
type Steering struct {
	Dir string // of the record; on tmpfs, because the settings end with the machine's boot
}

// In returns the steering with its record in the run directory of an agent.
func In(runDir string) Steering { return Steering{Dir: filepath.Join(runDir, "steering")} }

// Folders returns the folders of records in the same run directory. They can be removed when nothing is recorded.
func (s Steering) Folders() (all []string) {
	for _, dir := range []string{s.Dir, tableDir} {
		if _, err := os.Stat(dir); err == nil && filepath.Dir(dir) == filepath.Dir(s.Dir) {
			all = append(all, dir)
		}
	}
	return all
}

// update locks the record, calls change, and writes the record, also after an error: change has then done a part. save
// writes the record earlier.
func (s Steering) update(change func(*record, func() error) error) error {
	lock, err := lockFolder(s.Dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	r, err := s.read()
	if err != nil {
		return err
	}
	save := func() error { return s.save(r) }
	return errors.Join(change(r, save), save())
}

func (s Steering) path() string { return filepath.Join(s.Dir, "record.json") }

func (s Steering) read() (*record, error) {
	r := &record{}
	err := statefile.Read(s.path(), recordVersion, r)
	if errors.Is(err, fs.ErrNotExist) {
		return &record{Version: recordVersion}, nil
	}
	return r, err
}

func (s Steering) save(r *record) error {
	if len(r.Devices) == 0 {
		return statefile.Remove(s.path())
	}
	return statefile.Write(s.path(), r, 0o600)
}

// find returns the entry of a device; nil if its steering was not set.
func (r *record) find(d Device, inode uint64, index int) *entry {
	i := slices.IndexFunc(r.Devices, func(e *entry) bool {
		return e.Inode == inode && e.Index == index && e.Name == d.Name
	})
	if i < 0 {
		return nil
	}
	return r.Devices[i]
}

// errGone means that a recorded device does not exist any more.
var errGone = errors.New("device is gone")

// open opens the namespace and the sysfs of an entry. The namespace may have another path now.
func (e *entry) open() (*tree, error) {
	ns, err := e.namespace()
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	t, err := openTree(ns)
	if err != nil {
		return nil, err
	}
	index, err := t.index(e.Name)
	switch {
	case errors.Is(err, fs.ErrNotExist) || err == nil && index != e.Index:
		err = errGone
	case err == nil:
		return t, nil
	}
	return nil, errors.Join(err, t.Close())
}

func (e *entry) namespace() (*netns.Namespace, error) {
	if ns, err := e.at(e.Netns); err == nil {
		return ns, nil
	}
	others, err := netns.Others()
	if err != nil {
		return nil, err
	}
	for _, path := range append([]string{""}, others...) {
		if ns, err := e.at(path); err == nil {
			return ns, nil
		}
	}
	return nil, errGone
}

// at opens the namespace at a path if it is the entry's.
func (e *entry) at(path string) (*netns.Namespace, error) {
	ns, err := open(path)
	if err != nil {
		return nil, err
	}
	if inode, err := ns.Inode(); err != nil || inode != e.Inode {
		return nil, errors.Join(errGone, err, ns.Close())
	}
	return ns, nil
}
