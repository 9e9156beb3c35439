package ramp

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/lab"
)

// meter reads the run time of the nodes' programs.
type meter struct {
	programs map[string][]*ebpf.Program // by node
	had      map[string]time.Duration
	last     time.Time
}

// newMeter finds the programs of nodes: those that count drops in a node's table. The kernel counts the time of
// programs that they call for them.
func newMeter(l *lab.Lab, nodes []string) (_ *meter, err error) {
	m := &meter{programs: map[string][]*ebpf.Program{}, had: map[string]time.Duration{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.Close())
		}
	}()
	of := map[ebpf.MapID]string{}
	for _, node := range nodes {
		table, err := ebpf.LoadPinnedMap(filepath.Join(l.BPF(node), "maps", bpfobj.PinDrops), nil)
		if err != nil {
			return nil, fmt.Errorf("a table of node %s: %w", node, err)
		}
		info, err := table.Info()
		table.Close()
		if err != nil {
			return nil, err
		}
		id, _ := info.ID()
		of[id] = node
	}
	for id, err := ebpf.ProgramGetNextID(0); err == nil; id, err = ebpf.ProgramGetNextID(id) {
		p, err := ebpf.NewProgramFromID(id)
		if errors.Is(err, os.ErrNotExist) {
			continue // it is gone
		}
		if err != nil {
			return nil, err
		}
		node := ""
		if info, err := p.Info(); err == nil {
			maps, _ := info.MapIDs()
			for _, id := range maps {
				if of[id] != "" {
					node = of[id]
				}
			}
		}
		if node == "" {
			p.Close()
			continue
		}
		m.programs[node] = append(m.programs[node], p)
	}
	for _, node := range nodes {
		if len(m.programs[node]) == 0 {
			return nil, fmt.Errorf("node %s has no programs", node)
		}
	}
	return m, nil
}

func (m *meter) Close() (err error) {
	for _, all := range m.programs {
		for _, p := range all {
			err = errors.Join(err, p.Close())
		}
	}
	return err
}

// load returns for how many CPUs the programs of each node were busy since the last call.
func (m *meter) load() (map[string]float64, error) {
	load, now := map[string]float64{}, time.Now()
	for node, programs := range m.programs {
		var total time.Duration
		for _, p := range programs {
			stats, err := p.Stats()
			if err != nil {
				return nil, fmt.Errorf("a program of node %s: %w", node, err)
			}
			total += stats.Runtime
		}
		load[node] = (total - m.had[node]).Seconds() / now.Sub(m.last).Seconds()
		m.had[node] = total
	}
	m.last = now
	return load, nil
}
