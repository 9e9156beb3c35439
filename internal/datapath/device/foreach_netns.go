package device

import (
	"errors"
	"fmt"
	"os"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
)

// errNetnsNotFound is of a container whose namespace this process finds neither where it was nor elsewhere.
var ErrNetnsNotFound = errors.New("no namespace that is seen here is the container's")

// forEachNetns calls f in the containers' namespaces, also those whose path only the runtime sees, for which one walk through
// all namespaces does. It tells what went wrong.
func (d *Devices) forEachNetns(
	k deviceDriver,
	records []endpoint.Record,
	f func(endpoint.Record, *ContainerNS) error,
) map[endpoint.ID]error {
	errs := map[endpoint.ID]error{}
	do := func(r endpoint.Record, in *ContainerNS) {
		if err := f(r, in); err != nil {
			errs[r.ID] = err
		}
	}
	elsewhere := map[int][]endpoint.Record{}
	for _, r := range records {
		home, err := k.netnsID(r)
		if err != nil {
			errs[r.ID] = err
			continue
		}
		err = inNetns(r.Netns, func(in *ContainerNS) error {
			if there, err := k.netnsIDOf(in); err != nil || there != home {
				return ErrNetnsNotFound
			}
			do(r, in)
			return nil
		})
		if isNetnsGone(err) || errors.Is(err, ErrNetnsNotFound) {
			elsewhere[home] = append(elsewhere[home], r)
		} else if err != nil {
			errs[r.ID] = err
		}
	}
	if len(elsewhere) == 0 {
		return errs
	}
	err := WalkNetns(func(_ string, in *ContainerNS) (enough bool, err error) {
		if home, err := k.netnsIDOf(in); err == nil {
			for _, r := range elsewhere[home] {
				do(r, in)
			}
			delete(elsewhere, home)
		}
		return len(elsewhere) == 0, nil
	})
	for _, missing := range elsewhere {
		for _, r := range missing {
			if errs[r.ID] = err; err == nil {
				errs[r.ID] = fmt.Errorf("namespace %s: %w", r.Netns, ErrNetnsNotFound)
			}
		}
	}
	return errs
}

func inNetns(path string, f func(*ContainerNS) error) error {
	in, err := OpenContainerNS(path)
	if err != nil {
		return err
	}
	defer in.Close()
	return f(in)
}

// walkNetns opens the machine's namespaces but the calling thread's, one after the other, until f has seen enough.
func WalkNetns(f func(path string, in *ContainerNS) (enough bool, err error)) error {
	paths, err := netns.Others()
	if err != nil {
		return err
	}
	for _, path := range paths {
		in, err := OpenContainerNS(path)
		if isNetnsGone(err) || errors.Is(err, os.ErrPermission) {
			continue // or it is in a file system of its owner alone
		}
		enough := false
		if err == nil {
			enough, err = f(path, in)
			in.Close()
		}
		if err != nil {
			return fmt.Errorf("look into the namespace %s: %w", path, err)
		}
		if enough {
			break
		}
	}
	return nil
}

// isNetnsGone tells of a namespace at a path that has led to one.
func isNetnsGone(err error) bool {
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, netns.ErrNone)
}
