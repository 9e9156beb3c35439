package device

import (
	"log/slog"

	"pilaster.io/pilaster/internal/endpoint"
)

// Repair repairs differences on both sides of endpoints' devices. It logs what it cannot repair and leaves that
// endpoint as it is; CHECK reports it too.
func (d *Devices) Repair(records []endpoint.Record) {
	for k, records := range d.byDriver(records) {
		logs := map[endpoint.ID]*slog.Logger{}
		for i, r := range records {
			// The goroutine that follows the uplink's MTU writes it to the record.
			r.Device.MTU = k.effectiveMTU(r.Device.MTU)
			records[i] = r
			logs[r.ID] = d.Log.With("endpoint", r.ID, "container", r.ContainerID, "pod", r.Pod)
			checkAndRepair(logs[r.ID], func() error { return k.Check(r) }, func() error { return k.Repair(r) })
		}
		unseen := d.forEachNetns(k, records, func(r endpoint.Record, in *ContainerNS) error {
			checkAndRepair(
				logs[r.ID],
				func() error { return d.checkContainer(r, in) },
				func() error { return d.setUpContainer(r, in) },
			)
			return nil
		})
		for id, err := range unseen {
			logs[id].Warn("the container's side was not compared", "error", err)
		}
	}
}

func checkAndRepair(log *slog.Logger, check, repair func() error) {
	difference := check()
	if difference == nil {
		return
	}
	err := repair()
	if err == nil {
		err = check()
	}
	if err != nil {
		log.Error("endpoint differs from its record", "difference", difference, "error", err)
		return
	}
	log.Warn("endpoint differed from its record and was repaired", "difference", difference)
}
