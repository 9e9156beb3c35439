package datapath

import "pilaster.io/pilaster/internal/endpoint"

// repair puts right what differs on the two sides of an endpoint's device. What cannot be put right is
// said, and leaves the endpoint as it is: CHECK names it too.
func (d *Datapath) repair(r endpoint.Record) {
	// The record gets it from what follows the uplink's MTU.
	r.Device.MTU = d.kind(r).narrowed(r.Device.MTU)
	log := d.log.With("endpoint", r.ID, "container", r.ContainerID, "pod", r.Pod)
	compare := func(check, repair func() error) {
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
	compare(func() error { return d.kind(r).check(r) }, func() error { return d.kind(r).repair(r) })
	in, err := openInside(r.Netns)
	if err != nil {
		log.Warn("container's side was not compared", "error", err)
		return
	}
	defer in.Close()
	compare(func() error { return d.checkInside(r, in) }, func() error { return d.setUpInside(r, in) })
}
